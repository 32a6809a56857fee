"""A CPU that says it has kernels: the reference makers decide residency, so CI runs that path."""

from __future__ import annotations

from freetoken.devices.cpu import CpuDevice


class KernelCpu(CpuDevice):
    kernels = True
    owns_memory = True
    in_host_memory = False
    run_ahead = False

"""What a device can be told to do wrong, so that tests see who notices.

Plain data; each device acts on what it has. Knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Faults:
    """Fault hooks of a device; all off by default.

    stall_host_s      s      each CPU branch takes this much longer
    delay_copy_s      s      each link copy takes this much longer
    fail_alloc        int    the k-th pool allocation or resize fails (1 = the next)
    drop_wait         int    the k-th stream wait is ignored
    hang_copy         bool   copies never complete
    corrupt_copy      bool   copies deliver zeros
    unplanned_bytes   int    the driver sees so much more taken than pools, as kernels' code and caches would
    """

    stall_host_s: float = 0.0
    delay_copy_s: float = 0.0
    fail_alloc: int = 0
    drop_wait: int = 0
    hang_copy: bool = False
    corrupt_copy: bool = False
    unplanned_bytes: int = 0

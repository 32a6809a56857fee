"""The machine as measured numbers: memories and bandwidths, and the presets of known machines.

Rates are bytes per second, sizes bytes, times seconds. Presets restate published figures; a value
that a source gives as a range or class only is marked approximate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from freetoken.core.errors import ConfigError, nearest
from freetoken.core.units import GIB, MIB

GB = 10**9
GATHER_SHARE = 0.85
"""What kernels read of the link's copy rate (measured 46.8 of 55 GB/s)."""


@dataclass(frozen=True)
class Machine:
    """Bandwidths used for planning and by the simulated device.

    host_bw        bytes/s  what all CPU threads read from host memory together (B_H)
    link_bw        bytes/s  pinned host-to-device transfer (B_P)
    gpu_bw         bytes/s  device memory
    gpu_flops      flop/s   16-bit matrix rate used for prefill cost
    gpu_memory     bytes    0 = no GPU
    host_memory    bytes
    fill_fixed_s   s        fixed cost of one fill batch (a_p)
    cpu_fixed_s    s        fixed cost of one CPU branch round trip (a_c)
    dram_bw        bytes/s  what memory gives CPU and link together; 0 = host_bw, the published model
    """

    name: str
    host_bw: float
    link_bw: float
    gpu_bw: float
    gpu_flops: float
    gpu_memory: int
    host_memory: int
    fill_fixed_s: float = 5e-6
    cpu_fixed_s: float = 10e-6
    cpu_flops: float = 400e9
    dram_bw: float = 0.0
    approximate: tuple[str, ...] = ()

    @property
    def host_bw_beside_link(self) -> float:
        """What the CPU reads while the link is busy: they disturb each other only past saturation."""
        left = (self.dram_bw or self.host_bw) - self.link_bw
        return min(self.host_bw, max(left, 0.01 * self.host_bw))

    def with_rates(self, **rates: float) -> Machine:
        return replace(self, **rates)  # type: ignore[arg-type]


# name, GPU memory GiB, GPU GB/s, link GB/s, host GB/s, host memory GiB, Tflop/s, approximate fields
_FIGURES = (
    ("3090", 24, 936, 25.0, 57.0, 256, 71, "host_bw host_memory gpu_flops"),
    ("4090", 24, 1008, 25.0, 65.0, 256, 165, "host_bw host_memory gpu_flops"),
    ("5090-server", 32, 1792, 52.7, 77.3, 512, 210, "host_memory gpu_flops"),
    ("5090-desktop", 32, 1792, 53.0, 53.8, 192, 210, "link_bw host_memory gpu_flops"),
    ("4060-laptop", 8, 264, 11.9, 47.5, 64, 60, "gpu_bw link_bw host_memory gpu_flops"),
    ("pro-6000", 96, 1792, 53.0, 178.0, 512, 250, "link_bw gpu_flops"),
)

PRESETS: dict[str, Machine] = {
    name: Machine(
        name=name,
        host_bw=host * GB,
        link_bw=link * GB,
        gpu_bw=gpu * GB,
        gpu_flops=tf * 1e12,
        gpu_memory=vram * GIB,
        host_memory=ram * GIB,
        approximate=tuple(approx.split()),
    )
    for name, vram, gpu, link, host, ram, tf, approx in _FIGURES
}


def preset(name: str) -> Machine:
    """Return a preset by name; an unknown name lists the known ones."""
    if name not in PRESETS:
        raise ConfigError(
            f"Unknown machine {name!r}; there are: {', '.join(PRESETS)}.",
            code="unknown_machine",
            hint=nearest(name, PRESETS),
        )
    return PRESETS[name]


def slow_link(played: float, real: float) -> list[int]:
    """Words of a link of `played` bytes a second in place of the `real` one (`kernels.slow_link`): free since
    ever; ns for a MiB by copies, by kernels that read host memory, by copies over the real one."""
    return [0, *(round(1e9 * MIB / rate) for rate in (played, GATHER_SHARE * played, real))]

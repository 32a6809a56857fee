"""The machine as measured numbers: memories and bandwidths, and the presets of known machines.

Rates are bytes per second, sizes bytes, times seconds. Presets restate published figures; a value
that a source gives as a range or class only is marked approximate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from freetoken.core.errors import ConfigError, nearest
from freetoken.core.units import GIB

GB = 10**9


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
    approximate: tuple[str, ...] = ()

    def with_rates(self, **rates: float) -> Machine:
        return replace(self, **rates)  # type: ignore[arg-type]


def _preset(name: str, *, vram: int, gpu: float, link: float, host: float, ram: int, tf: float, approx: str):
    return Machine(
        name=name,
        host_bw=host * GB,
        link_bw=link * GB,
        gpu_bw=gpu * GB,
        gpu_flops=tf * 1e12,
        gpu_memory=vram * GIB,
        host_memory=ram * GIB,
        approximate=tuple(approx.split()),
    )


PRESETS: dict[str, Machine] = {
    m.name: m
    for m in (
        _preset(
            "3090", vram=24, gpu=936, link=25, host=57, ram=256, tf=71, approx="host_bw host_memory gpu_flops"
        ),
        _preset(
            "4090",
            vram=24,
            gpu=1008,
            link=25,
            host=65,
            ram=256,
            tf=165,
            approx="host_bw host_memory gpu_flops",
        ),
        _preset(
            "5090-server",
            vram=32,
            gpu=1792,
            link=52.7,
            host=77.3,
            ram=512,
            tf=210,
            approx="host_memory gpu_flops",
        ),
        _preset(
            "5090-desktop",
            vram=32,
            gpu=1792,
            link=53,
            host=53.8,
            ram=192,
            tf=210,
            approx="link_bw host_memory gpu_flops",
        ),
        _preset(
            "4060-laptop",
            vram=8,
            gpu=264,
            link=11.9,
            host=47.5,
            ram=64,
            tf=60,
            approx="gpu_bw link_bw host_memory gpu_flops",
        ),
        _preset(
            "pro-6000", vram=96, gpu=1792, link=53, host=178, ram=512, tf=250, approx="link_bw gpu_flops"
        ),
    )
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

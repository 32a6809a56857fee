"""Published models as the numbers that decide their serving speed: one table, no weights.

Owns shapes, expert bytes and the bytes read beside the experts. Doesn't know machines.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class Geometry:
    """A model's expert pool and what else a token reads.

    layers, experts, top_k    MoE layers, routed experts of one, routed experts a token
    hidden, width             H and I
    expert_bytes              one record
    dense_bytes               read per token beside routed experts: mixers, shared experts, head (resident)
    dense_params              weights behind dense_bytes, for prefill flops
    kv_bytes_per_token        KV of one position, all layers
    smaller                   the same model in a smaller format, for machines that can't hold this one
    """

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    width: int
    format: str
    expert_bytes: int
    dense_bytes: int
    dense_params: int
    kv_bytes_per_token: int
    smaller: str = ""

    @property
    def pool(self) -> int:
        return self.layers * self.experts

    @property
    def pool_bytes(self) -> int:
        return self.pool * self.expert_bytes

    @property
    def token_cycle(self) -> int:
        return self.layers * self.top_k

    @property
    def shape(self) -> str:
        """The name of the trace geometry: `40x256k8`."""
        return f"{self.layers}x{self.experts}k{self.top_k}"


# name, (layers, experts, top-k), (hidden, width), format, expert MB, (dense GB, dense weights in 10^9),
# KV KiB a token, the smaller format. Dense and KV figures are estimates from the published shapes.
_FIGURES = (
    ("qwen3.6-35b-a3b", (40, 256, 8), (2048, 512), "bf16", 6.29, (3.9, 1.95), 20, "qwen3.6-35b-a3b-nvfp4"),
    ("qwen3.6-35b-a3b-nvfp4", (40, 256, 8), (2048, 512), "nvfp4", 1.77, (2.2, 1.95), 20, ""),
    ("qwen3-30b-a3b", (48, 128, 8), (2048, 768), "bf16", 9.44, (3.0, 1.5), 96, ""),
    ("deepseek-v4-flash", (43, 256, 6), (4096, 2048), "mxfp4", 13.4, (8.0, 6.4), 8, ""),
    ("glm-5.2", (75, 256, 8), (6144, 2048), "nvfp4", 21.2, (18.0, 16.0), 90, ""),
    ("gpt-oss-120b", (36, 128, 4), (2880, 2880), "mxfp4", 13.2, (3.1, 1.55), 72, ""),
)

GEOMETRIES: dict[str, Geometry] = {
    name: Geometry(
        name,
        *shape,
        *size,
        format=format_name,
        expert_bytes=round(expert_mb * 1e6),
        dense_bytes=round(dense_gb * 1e9),
        dense_params=round(billions * 1e9),
        kv_bytes_per_token=kv_kib * 1024,
        smaller=smaller,
    )
    for name, shape, size, format_name, expert_mb, (dense_gb, billions), kv_kib, smaller in _FIGURES
}


def geometry(name: str) -> Geometry:
    """Return a geometry by name; an unknown name lists the known ones."""
    if name not in GEOMETRIES:
        raise ConfigError(
            f"There is no geometry {name!r}; there are: {', '.join(GEOMETRIES)}.",
            code="unknown_choice",
            hint=nearest(name, GEOMETRIES),
        )
    return GEOMETRIES[name]

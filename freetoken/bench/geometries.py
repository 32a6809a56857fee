"""Published models as the numbers that decide their serving speed: one table, no weights.

Owns shapes, expert bytes and the bytes read beside the experts. Doesn't know machines. Figures marked `~`
in a note are estimates (attention and shared weights from the published shapes).
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.core.errors import ConfigError, nearest

MB = 10**6


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


def _row(
    name: str, shape: tuple[int, int, int], size: tuple[int, int], fmt: str, expert_mb: float,
    dense: tuple[float, float], kv_kb: float, smaller: str = "",
) -> Geometry:  # fmt: skip
    layers, experts, top_k = shape
    dense_gb, dense_gparams = dense
    return Geometry(
        name, layers, experts, top_k, *size, fmt,
        expert_bytes=round(expert_mb * MB),
        dense_bytes=round(dense_gb * 1e9),
        dense_params=round(dense_gparams * 1e9),
        kv_bytes_per_token=round(kv_kb * 1024),
        smaller=smaller,
    )  # fmt: skip


GEOMETRIES: dict[str, Geometry] = {
    g.name: g
    for g in (
        _row(
            "qwen3.6-35b-a3b",
            (40, 256, 8),
            (2048, 512),
            "bf16",
            6.29,
            (3.9, 1.95),
            20,
            "qwen3.6-35b-a3b-nvfp4",
        ),
        _row("qwen3.6-35b-a3b-nvfp4", (40, 256, 8), (2048, 512), "nvfp4", 1.77, (2.2, 1.95), 20),
        _row("qwen3-30b-a3b", (48, 128, 8), (2048, 768), "bf16", 9.44, (3.0, 1.5), 96),
        _row("deepseek-v4-flash", (43, 256, 6), (4096, 2048), "mxfp4", 13.4, (8.0, 6.4), 8),
        _row("glm-5.2", (75, 256, 8), (6144, 2048), "nvfp4", 21.2, (18.0, 16.0), 90),
        _row("gpt-oss-120b", (36, 128, 4), (2880, 2880), "mxfp4", 13.2, (3.1, 1.55), 72),
    )
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

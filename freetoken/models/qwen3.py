"""Qwen3: dense, q and k normed per head, heads of 128 unless the config says otherwise."""

from __future__ import annotations

from freetoken.models import _dense

TINY = {"model_type": "qwen3", **_dense.TINY, "head_dim": 16}


class Qwen3Family(_dense.DenseFamily):
    name = "qwen3"
    model_types = ("qwen3",)
    TINY = TINY
    switches = _dense.Switches(qk_norm=True, head_dim=128)


FAMILY = Qwen3Family()

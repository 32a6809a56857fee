"""Qwen2 and Qwen2.5: dense, with biases on q, k and v but not on the output."""

from __future__ import annotations

from freetoken.models import _dense

TINY = {"model_type": "qwen2", **_dense.TINY}


class Qwen2Family(_dense.DenseFamily):
    name = "qwen2"
    model_types = ("qwen2",)
    TINY = TINY
    switches = _dense.Switches(qkv_bias=True)


FAMILY = Qwen2Family()

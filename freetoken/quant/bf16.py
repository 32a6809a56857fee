"""Weights as bfloat16, as stored by the checkpoint."""

from __future__ import annotations

import torch

from freetoken.quant._plain import PlainFormat


class Bf16(PlainFormat):
    name = "bf16"
    dtype = torch.bfloat16
    gguf_type = 30


FORMAT = Bf16()

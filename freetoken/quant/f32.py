"""Weights as float32, as stored by the checkpoint."""

from __future__ import annotations

import torch

from freetoken.quant._plain import PlainFormat


class F32(PlainFormat):
    name = "f32"
    dtype = torch.float32
    gguf_type = 0


FORMAT = F32()

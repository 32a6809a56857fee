"""Weights as float16, as stored by the checkpoint."""

from __future__ import annotations

import torch

from freetoken.quant._plain import PlainFormat


class F16(PlainFormat):
    name = "f16"
    dtype = torch.float16
    gguf_type = 1


FORMAT = F16()

"""Q5_K: five-bit codes; per 32 elements a six-bit scale and minimum, per 256 two float16 factors (GGUF).

weight = d * sc * code - dmin * mn. In a tile the six-bit numbers lie in bytes of their own.
"""

from __future__ import annotations

import torch

from freetoken.quant._gguf import Digits, Raw, SixBits
from freetoken.quant.q4_k import Q4K


class Q5K(Q4K):
    name = "q5_k"
    planes = (4, 1)
    levels = tuple(range(32))
    error = 0.04
    gguf_type = 13
    fields = (
        Raw("d", 2, torch.float16),
        Raw("dmin", 2, torch.float16),
        SixBits(),
        Digits("codes", 32, bits=1, run=32, at=4),
        Digits("codes", 128, bits=4, run=32),
    )


FORMAT = Q5K()

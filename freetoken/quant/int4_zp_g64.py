"""Four-bit integers, a float16 scale and a zero for every 64 along the summed dimension."""

from freetoken.quant._int4 import Int4

FORMAT = Int4(64, zeros=True)

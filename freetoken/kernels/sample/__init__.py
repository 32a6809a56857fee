"""Logits into tokens: one draw for each of some rows, told to the device and to the host.

    sample(logits, choices, last_tokens, slip)
        logits       float32 [R, V]
        choices      which rows, and how their tokens are drawn
        last_tokens  int64 [N] on the device: takes each choice's token                       (mutated)
        slip         of as many rows as choices: ids and bad flags, once the stream is here   (mutated)

Never waits for the device. Order: temperature, top-k, top-p, min-p, draw. A draw inverts the cumulative
distribution at u: over the kept tokens from the largest on, equal ones by their ids; or, where nothing is
left out, over all tokens by their ids. Makers agree on a token unless u lies within `rounding` of a border.
A row's token depends on its own logits and choice alone, bit for bit. Where its logits aren't finite a row is
bad, and its token some id of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.sample import reference, triton
from freetoken.kernels.sample._types import Choice as Choice
from freetoken.kernels.sample._types import Slip as Slip
from freetoken.kernels.sample._types import rounding as rounding

MAKERS = (reference, triton)


def sample(logits: Tensor, choices: Sequence[Choice], last_tokens: Tensor, slip: Slip) -> None:
    choose(MAKERS, logits.device.type).sample(logits, choices, last_tokens, slip)

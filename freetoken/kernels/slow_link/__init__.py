"""A slower link than there is, played for measuring: who brings bytes over it waits as long as it would take.

    behind_copy(link, num_bytes)    given to a copy's stream behind the copy: ends when the played link would
                                    have brought its num_bytes

link   int64 [4] on the device, `core.machine.slow_link`:
       when the played link is free (ns of the device's timer)                                     (mutated)
       ns for a MiB: by copies, by kernels that read host memory, by copies over the link that is there

Kernels that read host memory book their bytes in the same words (`_slow_link`), so that copies and kernels
share one link. What the real link can't is not played: it gives way to nobody in the midst of a booking.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.slow_link import reference, triton

MAKERS = (reference, triton)


def behind_copy(link: Tensor, num_bytes: int) -> None:
    choose(MAKERS, link.device.type).behind_copy(link, num_bytes)

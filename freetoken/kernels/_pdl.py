"""Programmatic dependent launch: a kernel's blocks start while the kernel before it still runs.

Between two kernels of a captured step lie 2 to 3 us in which memory rests: the end of one, the start of the
next, its first loads. On cards that can (sm_90 on) a kernel lets the next one in early, and that one fetches
what no kernel writes, its weights, before it waits. Rules, for each kernel that has PDL among its constants:

    every block passes `await_previous`, before it reads what is computed and before it writes anything;
    then all kernels before are over, not only the last: each of them has waited in its turn
    what was over before the kernel before had waited may be read early too, if that one lets in only then
    a kernel lets the next in when its own loads are on their way, since the next one's weights fill the
    memory's queues and its waiting blocks the multiprocessors: where work beside the stream wants to start
    (a prefetch while the host computes), not before that has had its chance
    whoever waits for the host lets nobody in

PDL false: nothing is compiled for it. CUDA C++ Programming Guide, "Programmatic Dependent Launch".
"""

from __future__ import annotations

from freetoken.kernels._triton import gdc, jit, tl


@jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel's blocks may take what room there is, once all of this one's came here or ended."""
    if PDL:
        gdc.gdc_launch_dependents()


@jit
def await_previous(PDL: tl.constexpr):
    """What the kernels before this one wrote is there."""
    if PDL:
        gdc.gdc_wait()

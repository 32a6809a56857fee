"""Device functions that play a slower link than there is: book bytes when they are asked for, wait for them.

The link is one queue for everybody (`kernels.slow_link` says its words): a booking begins when the one before
it ends, or now. So what many blocks ask for at once comes at the played rate in sum, whoever waits. No link
given: nothing is compiled. Interpreted kernels have no timer, so they book and never wait.
"""

from __future__ import annotations

from freetoken.kernels._triton import INTERPRETED, constexpr, gdc, jit, tl

INTERPRET = constexpr(INTERPRETED)


@jit
def now():
    """Nanoseconds of the device's timer, which all multiprocessors share."""
    return tl.cast(0, tl.int64) if INTERPRET else gdc.globaltimer()


@jit
def book(link, began, num_bytes, WORD: tl.constexpr):
    """When `num_bytes` asked for at `began` will have come; WORD names the rate."""
    took = (tl.cast(num_bytes, tl.int64) * tl.load(link + WORD)) >> 20
    tl.atomic_max(link, began, sem="relaxed")
    return tl.atomic_add(link, took, sem="relaxed") + took


@jit
def ask(link, arrives, num_bytes):
    """The timer's low half when bytes that a kernel is about to read will have come: a register, no longer a
    wait than two seconds."""
    due = tl.cast(0, tl.int32)
    if link is not None:
        time = now()
        due = time.to(tl.int32)
        if arrives:
            due = book(link, time, num_bytes, 2).to(tl.int32)
    return due


@jit
def await_bytes(link, due):
    if link is not None:  # noqa: SIM102 - decided while compiling
        if not INTERPRET:
            while now().to(tl.int32) - due < 0:
                pass

"""Compile many kernels beside each other: run the code that launches them, launching nothing.

Triton compiles a kernel when it is first launched, one after the other, 0.4 to 0.8 s each. In a rehearsal
launches only say which kernels they need, as Triton specialises them for this card; threads compile those
meanwhile (the compiler's passes and ptxas leave Python alone), and later launches find them. What the
rehearsed code computes is garbage: it must not read a result on the host, nor index by one.
Invariant: whatever fails here, a launch outside compiles what it needs, as if there had been no rehearsal.
"""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from torch import Tensor

from freetoken.core.log import logger
from freetoken.kernels._triton import AVAILABLE, INTERPRETED, TAKER, Launch, triton

_log = logger("kernels")

Tell = Callable[[int, int], None]


class Rehearsal:
    """Takes launches; keeps the threads that compile.

    asked      kernels that were asked for
    compiled   those of them that the cache on disk did not have, as far as is known yet
    failed     those that could not be compiled
    """

    def __init__(self, workers: int) -> None:
        self.failed = 0
        self._missing: list[str] = []
        self._pool = ThreadPoolExecutor(workers, "freetoken-compile")
        self._mode = triton.AsyncCompileMode(self, ignore_errors=True)
        self._seen: set[Hashable] = set()
        self._launchers: set[Hashable] = set()

    @property
    def asked(self) -> int:
        return len(self._mode.raw_futures)

    @property
    def compiled(self) -> int:
        return len(self._missing)

    def submit(self, compile_one: Callable[[], Any]) -> Future[Any]:
        """Triton's way to hand over a compilation."""
        return self._pool.submit(self._compile, compile_one)

    def found_all(self) -> bool:
        """Wait until all that was asked for is ready, or something turns out to be missing on disk."""
        for future in as_completed(self._mode.raw_futures):
            if self.compiled or future.exception():
                return False
        return True

    def run(self, code: Callable[[Rehearsal], None], tell: Tell) -> None:
        """In a context of its own: rehearse `code`, wait until everything is compiled."""
        TAKER.set(self._take)
        knobs = triton.knobs.compilation
        before = knobs.listener

        def note(*, src: Any, cache_hit: bool, **facts: Any) -> None:
            if not cache_hit:
                self._missing.append(src.name)
            if before is not None:
                before(src=src, cache_hit=cache_hit, **facts)

        knobs.listener = note
        try:
            with self._pool, self._mode:
                self._run(code, tell)
        finally:
            knobs.listener = before

    def _run(self, code: Callable[[Rehearsal], None], tell: Tell) -> None:
        try:
            code(self)
        except Exception as error:
            _log.debug("the rehearsal of kernels ended early: %s", error, exc_info=True)
        try:
            for done, future in enumerate(as_completed(self._mode.raw_futures), 1):
                if (failure := future.exception()) is not None:
                    self.failed += 1
                    _log.debug("a kernel could not be compiled ahead: %s", failure)
                tell(done, self.asked)
        except BaseException:
            for future in self._mode.raw_futures:
                future.cancel()
            raise

    def _compile(self, compile_one: Callable[[], Any]) -> Any:
        """The kernel, and the C function that passes its arguments on: kernels of equal types share one."""
        kernel = compile_one()
        types = tuple(kernel.src.signature.values())
        if types not in self._launchers:
            self._launchers.add(types)
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    def _take(self, launch: Launch) -> None:
        kind = _kind(launch)
        if kind not in self._seen:
            self._seen.add(kind)
            launch.run(warmup=True)


def rehearse(
    code: Callable[[Rehearsal], None], workers: int, tell: Tell = lambda done, of: None
) -> Rehearsal | None:
    """Run `code` without launching, and compile what it asks for with `workers` threads.

    tell    hears how many of how many are ready; what it raises ends the rehearsal and is raised
    Returns what was asked for, or None where kernels aren't compiled ahead.
    """
    if not AVAILABLE or INTERPRETED:
        return None
    ends: list[Exception] = []

    def heard(done: int, of: int) -> None:
        try:
            tell(done, of)
        except Exception as error:
            ends.append(error)
            raise

    try:
        one = Rehearsal(workers)
        # Triton's compiler changes what warnings all threads ignore, and puts it back in any order.
        with warnings.catch_warnings():
            contextvars.copy_context().run(one.run, code, heard)
    except Exception as error:
        if ends:
            raise
        _log.debug("kernels are compiled one by one: %s", error, exc_info=True)
        return None
    return one


def _kind(launch: Launch) -> Hashable:
    """Equal for launches of one kernel, nearly always; asking Triton costs more than a launch."""
    args = tuple(
        _form(value, param.do_not_specialize)
        for param, value in zip(launch.kernel.params, launch.args, strict=False)
    )
    built = (launch.kernel, launch.warps, launch.stages, launch.registers)
    return (*built, args, tuple(launch.consts.items()))


def _form(value: Any, varying: bool) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return value.bit_length() < 32, not varying and (value == 1, value % 16 == 0)
    return type(value).__name__

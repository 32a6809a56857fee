"""Compile many kernels beside each other: run the code that launches them, launching nothing.

Triton compiles a kernel when it is first launched, one after the other, 0.4 to 0.8 s each. In a rehearsal
launches only say which kernels they need, as Triton specialises them for this card; threads compile those
meanwhile, and later launches find them. The compiler's passes and ptxas leave Python alone, a quarter of the
work doesn't: threads beyond the first few have a process each (`_helper`), once it is seen that the cache on
disk lacks kernels. What the rehearsed code computes is garbage: it must not read a result on the host, nor
index by one.
Invariant: whatever fails here, a launch outside compiles what it needs, as if there had been no rehearsal.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, as_completed, wait
from queue import Empty, PriorityQueue, SimpleQueue
from typing import Any

from torch import Tensor

from freetoken.core.log import logger
from freetoken.kernels._helper import Helper, Request
from freetoken.kernels._triton import AVAILABLE, INTERPRETED, TAKER, Launch, triton
from freetoken.native.topology import default_threads

MOST_WORKERS = 8
TRIES = 4
READ_S = 0.25
"""A kernel that is not there by then is being compiled: reading one takes some milliseconds."""
_log = logger("kernels")

Tell = Callable[[int, int], None]


class Rehearsal:
    """Takes launches; keeps the threads that compile.

    asked      kernels that were asked for
    compiled   those of them that the cache on disk did not have, as far as is known yet
    failed     those that could not be compiled; helped: those that other processes compiled
    """

    def __init__(self, workers: int, helpers: int = 0) -> None:
        self.failures: list[str] = []
        self.helped = 0
        self._most_helpers = helpers
        self._helpers: list[Helper] = []
        self._idle: SimpleQueue[Helper] = SimpleQueue()
        self._waiting: PriorityQueue[tuple[int, int, Future[Any], Callable[[], Any]]] = PriorityQueue()
        self._length = 0
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

    @property
    def failed(self) -> int:
        return len(self.failures)

    def submit(self, compile_one: Callable[[], Any]) -> Future[Any]:
        """Triton's way to hand over a compilation. Long sources go first: nobody waits for one at the end."""
        future: Future[Any] = Future()
        self._waiting.put((-self._length, self.asked, future, compile_one))
        self._pool.submit(self._next)
        return future

    def found_all(self) -> bool:
        """Wait until all that was asked for is ready, or something turns out to be missing on disk."""
        cold, left = False, set(self._mode.raw_futures)
        while left and not cold:
            done, left = wait(left, READ_S, FIRST_EXCEPTION)
            cold = bool(self.compiled or not done or any(future.exception() for future in done))
        if cold:
            self._start_helpers()
        return not cold

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
            for helper in self._helpers:
                helper.close()

    def _run(self, code: Callable[[Rehearsal], None], tell: Tell) -> None:
        try:
            code(self)
        except Exception as error:
            _log.debug("the rehearsal of kernels ended early: %s", error, exc_info=True)
        try:
            for done, future in enumerate(as_completed(self._mode.raw_futures), 1):
                if (failure := future.exception()) is not None:
                    self.failures.append(repr(failure))
                    _log.debug("a kernel could not be compiled ahead: %s", failure)
                tell(done, self.asked)
        except BaseException:
            for future in self._mode.raw_futures:
                future.cancel()
            raise

    def _start_helpers(self) -> None:
        try:
            for _ in range(min(self._most_helpers, self.asked // 4)):
                self._helpers.append(Helper())
                self._idle.put(self._helpers[-1])
        except OSError as error:
            _log.debug("no process could be started to compile: %s", error)

    def _ask_helper(self, compile_one: Callable[[], Any]) -> None:
        """Let a process compile it, if one is ready; what goes wrong there is tried again here."""
        try:
            helper = self._idle.get_nowait()
        except Empty:
            return
        try:
            if helper.ready() and helper.compile(Request.of(compile_one)):
                self._missing.append("")
                self.helped += 1
        except RuntimeError as error:
            _log.debug("a process could not compile a kernel: %s", error)
        except Exception as error:
            _log.debug("a process that compiles is lost: %s", error, exc_info=True)
            return
        self._idle.put(helper)

    def _next(self) -> None:
        *_, future, compile_one = self._waiting.get_nowait()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._compile(compile_one))
            except BaseException as error:
                future.set_exception(error)

    def _compile(self, compile_one: Callable[[], Any]) -> Any:
        """The kernel, and the C function that passes its arguments on: kernels of equal types share one."""
        self._ask_helper(compile_one)
        kernel = _again(compile_one)
        types = tuple(kernel.src.signature.values())
        if types not in self._launchers:
            self._launchers.add(types)
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    def _take(self, launch: Launch) -> None:
        kind = _kind(launch)
        if kind not in self._seen:
            self._seen.add(kind)
            self._length = len(launch.kernel.src)
            launch.run(warmup=True)


def _again(compile_one: Callable[[], Any]) -> Any:
    """Some Python 3.11 miscount when two threads parse at once (gh-106905), which is a SystemError."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(SystemError):
            return compile_one()
    return compile_one()


def rehearse(
    code: Callable[[Rehearsal], None],
    workers: int = 0,
    tell: Tell = lambda done, of: None,
    *,
    helpers: int = 0,
) -> Rehearsal | None:
    """Run `code` without launching, and compile what it asks for with `workers` threads.

    workers   0: one a core, up to MOST_WORKERS
    helpers   how many of the threads may have a process of their own
    tell      hears how many of how many are ready; what it raises ends the rehearsal and is raised
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
        one = Rehearsal(workers or most_workers(), helpers)
        # Triton's compiler changes what warnings all threads ignore, and puts it back in any order: what a
        # thread finds then must not be what makes errors of them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            contextvars.copy_context().run(one.run, code, heard)
    except Exception as error:
        if ends:
            raise
        _log.debug("kernels are compiled one by one: %s", error, exc_info=True)
        return None
    return one


def most_workers() -> int:
    return min(default_threads(), MOST_WORKERS)


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

"""The engine: one thread, an inbox, and a step that never waits for more than one thing.

    step:  read inbox -> schedule -> launch forward n+1 -> collect step n -> sample n+1 -> hand out
Owns the scheduler, the runner and live memory. Everything else talks to it through messages;
outputs leave once a step through `sink`. A request is at most one step behind (`run_ahead`); what
ended meanwhile is dropped before sampling. A failed step fails its requests, never the engine's thread;
one that finds no device memory for its activations is tried again in smaller chunks.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from torch import OutOfMemoryError

from freetoken.core.batch import Segment
from freetoken.core.errors import BusyError, ContextLengthError, DeviceError, FreeTokenError
from freetoken.core.interfaces import Device
from freetoken.core.log import logger
from freetoken.core.request import (
    Abort,
    FinishReason,
    Output,
    Request,
    SamplingParams,
    Submit,
    TokenLogprob,
)
from freetoken.engine.drawing import (
    accepts,
    broke_its_form,
    finish_reason,
    next_draw,
    not_a_number,
    note_token,
)
from freetoken.engine.memory import Memory
from freetoken.engine.plan import Plan
from freetoken.engine.prefill import PrefillJob
from freetoken.engine.rehearsal import PREPARING, prepare_kernels
from freetoken.engine.runner import Launched, Runner
from freetoken.engine.scheduler import NeedsSync, Schedule, Scheduler, Work
from freetoken.engine.segments import segment_of
from freetoken.engine.slips import Sampled
from freetoken.engine.stats import EngineStats
from freetoken.kernels._triton import compilations

log = logger("engine")
SWITCH_INTERVAL_S = 1e-4
"""A busy HTTP thread otherwise holds the interpreter 5 ms at a time (measured: 53 ms a step)."""
MAX_FAILED_STEPS = 3
SELF_TEST_PROMPT = 2048
"""Tokens: a whole piece of a prompt, so that memory has seen its most."""

Sink = Callable[[list[Output]], None]


@dataclass(frozen=True)
class _Resize:
    total_bytes: int
    result: Future[None]


@dataclass(frozen=True)
class _InFlight:
    """Tokens that nobody has read yet. is_step: `Runner.launch` began it; a prompt's job is no step."""

    requests: tuple[Request, ...]
    sampled: Sampled
    started_s: float
    is_step: bool


class Engine:
    """Runs requests to their end. `submit`, `abort`, `resize` are safe from any thread."""

    def __init__(
        self,
        plan: Plan,
        scheduler: Scheduler,
        runner: Runner,
        memory: Memory,
        device: Device,
        eos_ids: tuple[int, ...],
    ) -> None:
        self.plan, self.scheduler, self.runner = plan, scheduler, runner
        self.memory, self.device, self.eos_ids = memory, device, eos_ids
        self.stats = EngineStats()
        self.error: FreeTokenError | None = None
        self.on_job: Callable[[Sequence[Segment]], None] = lambda segments: None
        self._sink: Sink = lambda outputs: None
        self._inbox: queue.SimpleQueue[Submit | Abort | _Resize | None] = queue.SimpleQueue()
        self._outputs: list[Output] = []
        self._flight: _InFlight | None = None
        self._job: PrefillJob | None = None
        self._job_works: tuple[Work, ...] = ()
        self._grown = False
        self._due: tuple[Work, ...] | None = None
        self._resizes: deque[_Resize] = deque()
        self._collected_s = 0.0
        self._failed_steps = 0
        self._arrivals = 0
        self._stop = False
        self._thread: threading.Thread | None = None

    # --- from any thread ---

    def start(self, sink: Sink) -> None:
        """Run the loop in a thread of its own; `sink` gets each step's outputs there."""
        self._sink = sink
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = threading.Thread(target=self._loop, name="freetoken-engine", daemon=True)
        self._thread.start()

    def self_test(self, tell: Callable[[str], None] = lambda what: None, *, ahead: bool = True) -> None:
        """Draw one real token before `start`, through every part that serving uses.

        Raises what went wrong; nothing of it stays in the counters. Where kernels are compiled when they
        are first used, that is now and not at somebody's first request: a long prompt and a decode step.
        tell hears of each; the first time on a new card all of them take a minute of CPU time or more.
        ahead: compile them beside each other first, not one by one.
        """
        length, tokens = (2, 1) if not self.device.kernels else (SELF_TEST_PROMPT, 3)
        tokens = min(tokens, self.plan.max_model_len - 1)
        length = max(1, min(length, self.plan.max_model_len - tokens - 1))
        if self.device.compiles and ahead:
            prepare_kernels(self.runner, self.scheduler, length, tell)
        self._accept(
            Submit(
                "self-test", np.zeros(length, np.int32), SamplingParams(temperature=0.0, max_tokens=tokens)
            )
        )
        with compilations(lambda: tell(PREPARING)):
            while not self.idle:
                self.step()
        self.memory.hold(self.scheduler)
        outputs, self._outputs = self._outputs, []
        self.stats = EngineStats()
        self.error = None
        self.scheduler.reuse.clear()
        for output in outputs:
            if output.error is not None:
                raise output.error

    def submit(self, submit: Submit) -> None:
        self._inbox.put(submit)

    def abort(self, request_id: str) -> None:
        self._inbox.put(Abort(request_id))

    def resize(self, total_bytes: int) -> Future[None]:
        """Ask for another device memory budget; the future holds the outcome."""
        message = _Resize(total_bytes, Future())
        self._inbox.put(message)
        return message.result

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the current step; what still runs ends with an abort. Idempotent."""
        self._inbox.put(None)
        self.device.enter()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self.scheduler.reuse.cache.flush()
            self._thread = None
        self.scheduler.reuse.mover.close()
        self.device.synchronize()
        self.runner.experts.close()
        self.scheduler.reuse.cache.close()
        self.device.close()

    # --- the loop ---

    @property
    def idle(self) -> bool:
        s = self.scheduler
        return not (s.running or s.waiting or self._flight or self._job or self._resizes)

    def _loop(self) -> None:
        self.device.enter()
        while not self._stop:
            self.read_inbox(block=self.idle)
            if not self._stop and not self.idle:
                self.step()
            self._hand_out()
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            self._outputs.append(Output(request.id, finish=FinishReason.ABORT))
        for message in self._resizes:
            message.result.set_exception(BusyError("The engine stops.", code="draining"))
        self._hand_out()

    def _hand_out(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._sink(outputs)

    def read_inbox(self, *, block: bool = False) -> None:
        """Take all messages that wait; with `block`, wait for the first."""
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if message is None:
                self._stop = True
            elif isinstance(message, Submit):
                self._accept(message)
            elif isinstance(message, Abort):
                self._abort(message.request_id)
            else:
                self._resizes.append(message)

    def _accept(self, submit: Submit) -> None:
        request = Request(submit, number=self._arrivals, arrived_s=self.device.clock.now())
        self._arrivals += 1
        self.stats.requests += 1
        error: FreeTokenError | None = self.error
        if error is None and not request.num_prompt:
            error = FreeTokenError("The prompt is empty.", code="empty_prompt")
        if error is None and request.num_prompt >= self.plan.max_model_len:
            error = ContextLengthError(request.num_prompt, self.plan.max_model_len)
        if error is not None:
            self._fail(request, error)
            return
        self.stats.prompt_tokens += request.num_prompt
        self.scheduler.add(request)

    def _abort(self, request_id: str) -> None:
        """End a request at whatever phase it is in; late aborts find nothing."""
        request = self.scheduler.find(request_id)
        if request is None or request.finish is not None or request.doomed:
            return
        self.stats.aborted += 1
        if request.id in self.scheduler.in_job:
            if all(w.request is request or w.request.finish is not None for w in self._job_works):
                self._end_job(committed=False)
            else:
                request.doomed = True
        if not request.doomed:
            self.scheduler.release(request, FinishReason.ABORT)
        self._outputs.append(Output(request.id, finish=FinishReason.ABORT))

    # --- one step ---

    def step(self) -> None:
        """Advance everything by one step; a failure fails what was running, and only that."""
        try:
            self._step()
            self._failed_steps = 0
        except Exception as e:  # the boundary: nothing may kill the thread
            self._recover(e)

    def _step(self) -> None:
        started = self.device.clock.now()
        if self._resizes and self._job is None:
            self._resize_now()
        if self._grown and self._job is None:
            self._hold_memory()
        schedule = self._schedule()
        self._due = schedule.batch
        if schedule.job:
            self._start_job(schedule.job)
        self._advance_job(interpose=bool(schedule.batch))
        launched = None
        if schedule.batch:
            launched = self.runner.launch([segment_of(w) for w in schedule.batch])
            self.scheduler.launched(schedule.batch)
        self._due = None
        self._collect()
        if launched is not None:
            self._sample(schedule.batch, launched, started)
        if self._job is not None and self._job.done:
            self._finish_job(started)
        if not self.plan.run_ahead:
            self._collect()

    def _schedule(self) -> Schedule:
        busy = self._job is not None
        try:
            schedule = self.scheduler.schedule(in_flight=self._flight is not None, job_active=busy)
        except NeedsSync:
            self._collect()
            schedule = self.scheduler.schedule(in_flight=False, job_active=busy)
        self.stats.preemptions = self.scheduler.num_preemptions
        self.stats.cached_tokens = self.scheduler.reuse.cached_tokens
        for request in self.scheduler.refused:
            assert isinstance(request.error, FreeTokenError)
            self._fail(request, request.error)
        self.scheduler.refused.clear()
        now = self.device.clock.now()
        for work in (*schedule.batch, *schedule.job):
            if work.request.queued_s < 0:
                work.request.queued_s = now - work.request.arrived_s
        return schedule

    def _sample(self, works: Sequence[Work], launched: Launched, started: float) -> None:
        wanted = [w.request for w in works if w.wants_logits]
        alive = [i for i, r in enumerate(wanted) if r.finish is None and self.scheduler.wants_token(r)]
        if not alive:
            return
        requests = tuple(wanted[i] for i in alive)
        sampled = self.runner.sample(launched.logits, alive, [next_draw(r, self.eos_ids) for r in requests])
        self._put_in_flight(_InFlight(requests, sampled, started, is_step=True))

    def _put_in_flight(self, flight: _InFlight) -> None:
        if self._flight is not None:
            self._collect()
        for request in flight.requests:
            request.num_pending = 1
        self._flight = flight

    def _collect(self) -> None:
        """Read the step in flight and tell each request its token."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        tokens = self.runner.collect(flight.sampled)
        count = 0
        for request, token in zip(flight.requests, tokens, strict=True):
            request.num_pending = 0
            if request.finish is not None:
                continue
            if token.is_bad:
                self._fail(request, not_a_number())
                continue
            count += 1
            self._deliver(request, token.token_id, token.logprob)
        now = self.device.clock.now()
        seconds = now - max(flight.started_s, self._collected_s)
        self._collected_s = now
        self.stats.note_step(seconds, count)
        if flight.is_step:
            self.runner.end_step(seconds)

    def _deliver(self, request: Request, token_id: int, logprob: TokenLogprob | None) -> None:
        if not accepts(request, token_id, self.eos_ids):
            self._fail(request, broke_its_form())
            return
        note_token(request, token_id)
        reason = finish_reason(request, token_id, self.eos_ids, self.plan.max_model_len)
        self._outputs.append(
            Output(
                request.id,
                (token_id,),
                (logprob,) if logprob is not None else (),
                finish=reason,
                cached_tokens=request.num_cached,
                matched_tokens=request.num_matched,
                prompt_tokens=request.num_prompt,
                queued_s=request.queued_s,
            )
        )
        if reason is not None:
            self.stats.finished += 1
            self.scheduler.release(request, reason)
            return
        if request.num_output == 1:
            self.scheduler.reuse.commit(request, request.num_prompt)
        if token_id in request.submit.anchor_ids:
            self.scheduler.reuse.note_anchor(request)

    # --- layer-major prefill ---

    def _start_job(self, works: tuple[Work, ...]) -> None:
        self.stats.jobs += 1
        self._job_works = works
        segments = [segment_of(w) for w in works]
        self.on_job(segments)
        self._job = PrefillJob(self.runner, segments, self.scheduler.limits.chunk_tokens)

    def _advance_job(self, *, interpose: bool) -> None:
        """Run units until the job is complete, a running stream's next token is due, or somebody asks."""
        if self._job is None:
            return
        if interpose:
            self._job.advance_for(self.device, self.plan.prefill_gap_s)
            return
        while self._job.advance():
            if not self._inbox.empty():
                return

    def _finish_job(self, started: float) -> None:
        """Its first tokens are drawn, and its states on their way, before it is closed. Nobody waits."""
        assert self._job is not None and self._job.logits is not None
        wanted = [w.request for w in self._job_works if w.wants_logits]
        alive = [i for i, r in enumerate(wanted) if r.finish is None and not r.doomed]
        requests = tuple(wanted[i] for i in alive)
        flight = None
        if requests:
            draws = [next_draw(r, self.eos_ids) for r in requests]
            sampled = self.runner.sample(self._job.logits, alive, draws)
            flight = _InFlight(requests, sampled, started, is_step=False)
        self._end_job(committed=True)
        if flight is not None:
            self._put_in_flight(flight)

    def _end_job(self, *, committed: bool) -> None:
        """Commit or drop the macro-chunk; its doomed members leave now."""
        job, self._job = self._job, None
        if committed:
            self.scheduler.job_ended(committed=True)
        if job is not None:
            job.close()
        if not committed:
            self.scheduler.job_ended(committed=False)
        for work in self._job_works:
            if work.request.doomed:
                self.scheduler.release(work.request, FinishReason.ABORT)
        self._job_works = ()
        self._grown = True

    # --- trouble ---

    def _resize_now(self) -> None:
        """One a step, in the order they were asked for: whoever asked waits for an outcome."""
        message = self._resizes.popleft()
        try:
            self._collect()
            self.memory.resize_budget(self.scheduler, message.total_bytes)
            self.stats.resizes += 1
            message.result.set_result(None)
        except Exception as e:
            message.result.set_exception(e)
            if not isinstance(e, FreeTokenError):
                raise

    def _hold_memory(self) -> None:
        """Behind a long prompt, which may have taken more than was planned."""
        self._grown = False
        if self.device.over_bytes():
            self._collect()
            self.memory.hold(self.scheduler)

    def _fail(self, request: Request, error: FreeTokenError) -> None:
        self.stats.failed += 1
        self.scheduler.release(request, FinishReason.ERROR)
        self._outputs.append(Output(request.id, finish=FinishReason.ERROR, error=error))

    def _recover(self, error: Exception) -> None:
        """A step broke; what could only be too large is tried again, the rest fails."""
        due, self._due = self._due, None
        try:
            if isinstance(error, OutOfMemoryError) and due is not None and self._retry_smaller(due):
                log.warning("no memory for a step: %s", error)
                return
        except Exception as e:
            error = e
        self._fail_all(error)

    def _retry_smaller(self, due: Sequence[Work]) -> bool:
        """Let what was about to run wait again, and halve the chunks; False if they are small already.

        States are half advanced, so each request comes back from what the prefix cache has of it.
        """
        if not self.scheduler.halve_chunks():
            return False
        self._collect()
        self.runner.experts.rest()
        works = [*due, *self._job_works]
        self._end_job(committed=False)
        self.scheduler.retry(works)
        self.stats.halved_chunks += 1
        return True

    def _fail_all(self, error: Exception) -> None:
        """A step broke: its requests fail with a typed error, waiting ones go on.

        Unless it repeats, or the device itself failed: what it holds can't be trusted any more, and no
        answer is better than a wrong one, so the engine refuses everything until it is restarted.
        """
        log.error("step failed: %s", error, exc_info=log.isEnabledFor(10))
        wrapped = error if isinstance(error, FreeTokenError) else DeviceError(f"The step failed: {error}.")
        self._flight = None
        self.runner.experts.rest()
        self._end_job(committed=False)
        for request in list(self.scheduler.running):
            request.num_pending = 0
            self._fail(request, wrapped)
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS or isinstance(error, DeviceError):
            self.error = BusyError(
                f"The engine has failed: {wrapped.message}",
                code="engine_failed",
                hint="Restart the server; ft doctor --bundle collects what a report needs.",
            )
            for request in list(self.scheduler.waiting):
                self._fail(request, self.error)

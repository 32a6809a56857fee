"""LLM: a conversation in, a stream of events out. The waist between protocols and the engine.

Owns the engine, the chat codec and the live generations; thread-safe. The engine's thread hands token
ids over once a step and wakes each event loop once; text, stop strings and tool calls are read where
the answer is consumed. Loading runs wherever `load` is called, so a server can listen before it ends.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from freetoken.bench.traces import RoutingRecorder
from freetoken.chat.codec import AnswerReader, ChatCodec, Prompt
from freetoken.chat.constraint import ConstraintMaker, TokenConstraint
from freetoken.chat.conversation import Conversation
from freetoken.chat.events import Event, Finish
from freetoken.chat.prompt_edit import Asked, Place, find_edit
from freetoken.chat.prompt_history import PromptHistory
from freetoken.chat.script import Script
from freetoken.chat.tokenizer import Tokenizer
from freetoken.core import env
from freetoken.core.errors import BusyError, ConfigError, ContextLengthError, FreeTokenError, RequestError
from freetoken.core.generate import GenerateParams, PrefixReport, Status, Thinking, Timing
from freetoken.core.log import logger
from freetoken.core.options import Options
from freetoken.core.request import Output, SamplingParams, Submit, ThinkBudget
from freetoken.core.units import format_bytes
from freetoken.engine.plan import Plan

Progress = Callable[[str, int], None]
log = logger("llm")
SCRIPT_PREFIX = "script:"
LEAST_TEMPERATURE = 1e-5
"""Below it a draw is greedy: logits divided by less leave the range of float32 and become NaN."""


class Generation:
    """One answer on its way: iterate it, in a thread or in an event loop, exactly once.

    The last event is Finish; a failed request raises its FreeTokenError instead.
    """

    def __init__(self, request_id: str, reader: AnswerReader, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.prompt_tokens = reader.prompt_tokens
        self.timing = Timing()
        self.reuse = PrefixReport(prompt=reader.prompt_tokens)
        self.token_ids: list[int] = []
        self.asked: Asked | None = None
        self._reader, self._abort = reader, abort
        self._outputs: deque[Output] = deque()
        self._wake = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Event | None = None

    def cancel(self) -> None:
        """Stop generating. Idempotent, never blocks."""
        self._abort(self.request_id)

    def put(self, output: Output) -> asyncio.AbstractEventLoop | None:
        """Engine's side: queue an output; returns the loop to wake, if one waits."""
        if output.token_ids:
            if not self.token_ids:
                self.reuse.cached, self.reuse.matched = output.cached_tokens, output.matched_tokens
            self.token_ids += output.token_ids
            self.timing.queued_s = output.queued_s
            self.timing.note(len(output.token_ids), time.perf_counter())
        with self._wake:
            self._outputs.append(output)
            self._wake.notify()
        return self._loop

    def wake(self) -> None:
        """Runs in the event loop."""
        if self._ready is not None:
            self._ready.set()

    def __iter__(self) -> Iterator[Event]:
        while True:
            with self._wake:
                while not self._outputs:
                    self._wake.wait()
            if (yield from self._drain()):
                return

    async def __aiter__(self) -> AsyncIterator[Event]:
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        while True:
            self._ready.clear()
            if not self._outputs:
                await self._ready.wait()
            for event in (drained := list(self._drain())):
                yield event
            if drained and isinstance(drained[-1], Finish):
                return

    def _drain(self) -> Generator[Event, None, bool]:
        """Events of all queued outputs; returns True after the last one."""
        while self._outputs:
            output = self._outputs.popleft()
            if output.error is not None:
                raise output.error
            events = self._reader.feed(output)
            yield from events
            if events and isinstance(events[-1], Finish):
                if output.finish is None:
                    self._abort(self.request_id)
                return True
        return False


class LLM:
    """A model that answers. Made by `build_llm`, or made empty and then `load`ed in a thread."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.created = int(time.time())
        self.model_name = options.served_model_name or Path(options.model or "freetoken-demo").name
        self._built: Any = None
        """An engine.build.Built. Naming its type here would import torch, before a server's port listens."""
        self._status = Status("loading", 0)
        self._live: dict[str, Generation] = {}
        self._lock = threading.Lock()
        self._draining = False
        self._recorder: RoutingRecorder | None = None
        self._script: Script | None = None
        self._constraints: ConstraintMaker | None = None
        self._history = PromptHistory()
        atexit.register(_close, weakref.ref(self))

    # --- life ---

    def load(self, progress: Progress = lambda phase, percent: None, *, early: bool = False) -> None:
        """Build the engine, let it draw a token, start it; a failure is kept in `status` and raised.

        early   answer while experts are still being read; `status().percent` tells how many are there
        """

        def note(phase: str, percent: int) -> None:
            self._status = Status("loading", min(percent, 99))
            progress(phase, percent)

        try:
            _check_trace_path(self.options.record_routing)
            began = time.perf_counter()
            from freetoken.engine.build import build  # late: torch

            imported = time.perf_counter() - began
            self._script, options = scripted(self.options)
            built = build(options, note, early=early, heat=env.home() / "heat" if early else None)
            built.watch.add("imports", imported)
            with built.watch.part("self_test"):
                built.engine.self_test(lambda what: note(what, 99))
            if taken := built.device.taken_bytes():
                planned = format_bytes(built.snapshot()["memory"]["planned_bytes"])
                log.info("GPU memory: %s planned, the driver sees %s", planned, format_bytes(taken))
        except FreeTokenError as e:
            self._status = Status("failed", 0, e)
            raise
        self._constraints = ConstraintMaker(built.codec, built.config.vocab_size)
        self._built = built
        self.model_name = built.plan.model_name
        if self.options.record_routing:
            self._record(built)
        built.engine.start(self._dispatch)
        self._status = Status("ok", 100)

    def _record(self, built: Any) -> None:
        """Tap the routing of everything served; `close` writes the trace."""
        from freetoken.engine.tap import RoutingTap  # late: torch

        moe = built.config.moe
        if moe is None:
            raise ConfigError("--record-routing needs a model with routed experts.", code="no_experts")
        self._recorder = RoutingRecorder(built.config.num_moe_layers, moe.num_experts, moe.top_k)
        tap = RoutingTap(built.engine.runner.experts, self._recorder.record)
        built.engine.runner.experts = tap
        built.engine.on_job = tap.expect_job

    def close(self) -> None:
        """Stop the engine and write what was recorded. Idempotent."""
        if self._built is not None:
            self._built.close()
        if self._recorder is not None and self.options.record_routing:
            self._recorder.save(self.options.record_routing, {"model": self.model_name})
            self._recorder = None

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let running requests finish, abort what is left after `timeout_s`."""
        self._draining = True
        end = time.monotonic() + timeout_s
        while self._live and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for request_id in list(self._live):
            self.abort(request_id)

    # --- facts ---

    @property
    def built(self) -> Any:
        """The loaded parts, an engine.build.Built; BusyError while there are none."""
        if self._built is None:
            raise self._status.error or BusyError(
                f"The model is loading ({self._status.percent} %).", code="loading", hint="Try again shortly."
            )
        return self._built

    @property
    def plan(self) -> Plan:
        return cast(Plan, self.built.plan)

    @property
    def max_model_len(self) -> int:
        return self._built.plan.max_model_len if self._built else 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.codec.tokenizer

    @property
    def codec(self) -> ChatCodec:
        return cast(ChatCodec, self.built.codec)

    def status(self) -> Status:
        built = self._built
        if built is None:
            return self._status
        if built.error is not None:
            return Status("failed", 100, built.error)
        return Status(self._status.state, built.percent)

    def stats(self) -> dict[str, Any]:
        """Nested plain numbers: engine counters, expert counters, memory."""
        if self._built is None:
            return {"status": self._status.state, "percent": self._status.percent}
        return {"status": self.status().state, "model": self.model_name, **self._built.snapshot()}

    def resize_memory(self, total_bytes: int, timeout_s: float = 60.0) -> None:
        """Change the device memory budget while requests run; CapacityError leaves all as it was."""
        outcome = self.built.engine.resize(total_bytes)
        try:
            outcome.result(timeout_s)
        except concurrent.futures.TimeoutError as e:
            raise BusyError(
                "The engine has not come to a point where memory can move.",
                code="resize_pending",
                hint="It will happen there; GET /v1/cache shows when.",
            ) from e

    # --- requests ---

    def submit_chat(self, conversation: Conversation, params: GenerateParams, request_id: str) -> Generation:
        """Render, tokenise and enqueue; RequestError or ContextLengthError before anything runs."""
        codec = self.built.codec
        prompt = self._encode(conversation, params)
        self._check_length(len(prompt.ids), params, "messages")
        reader = codec.reader(conversation, prompt, stop=params.stop, logprobs=params.logprobs is not None)
        constraint = self._constrained(conversation, params, prompt)
        if constraint is not None:
            params = replace(params, ignore_eos=False)  # a form ends where it ends
        sampling = self._sampling(params, len(prompt.ids), prompt.think, prompt.stop_ids)
        if self._script is not None:
            said = self._script.answer(conversation, codec.grammar, in_thinking=prompt.starts_in_thinking)
            ids = codec.tokenizer.encode(said)
            sampling = replace(sampling, forced_ids=(*map(int, ids), *prompt.stop_ids[:1]))
        submit = Submit(
            request_id,
            prompt.ids,
            sampling,
            prompt.anchor_positions,
            prompt.anchor_ids,
            group=params.session or codec.normal_form(conversation).opening_id,
            constraint=constraint,
        )
        asked = codec.asked(conversation, prompt, submit.group)
        return self._submit(submit, reader, asked, partial(codec.place_of, conversation, prompt))

    def count_chat(self, conversation: Conversation, params: GenerateParams) -> int:
        """Length in tokens of the prompt that `submit_chat` would run. Runs nothing."""
        return len(self._encode(conversation, params).ids)

    def submit_text(
        self, prompt: str | NDArray[np.int32], params: GenerateParams, request_id: str
    ) -> Generation:
        """Complete a text or an id array, with no template and no parsing of the answer."""
        codec = self.built.codec
        if isinstance(prompt, str):
            ids = codec.tokenizer.encode(prompt, add_special=True)
        else:
            ids = np.asarray(prompt, np.int32)
        self._check_ids(ids)
        self._check_length(len(ids), params, "prompt")
        sampling = self._sampling(params, len(ids), None, ())
        reader = codec.text_reader(ids, stop=params.stop, logprobs=params.logprobs is not None)
        submit = Submit(request_id, ids, sampling, group=params.session)
        return self._submit(submit, reader, Asked(params.session, ids, len(ids)), lambda at: Place(0, ""))

    def abort(self, request_id: str) -> None:
        """End a request; a no-op when it has ended."""
        if self._built is not None:
            self._built.engine.abort(request_id)

    def _submit(
        self, submit: Submit, reader: AnswerReader, asked: Asked, place_of: Callable[[int], Place]
    ) -> Generation:
        """Enqueue, and find out meanwhile what was changed since an earlier prompt."""
        if self._draining:
            raise BusyError(
                "The server is shutting down.", code="draining", hint="Try again once it is back."
            )
        generation = Generation(submit.request_id, reader, self.abort)
        with self._lock:
            if submit.request_id in self._live:
                raise RequestError(f"Request id {submit.request_id} is in use.", code="duplicate_request")
            self._live[submit.request_id] = generation
        generation.asked = asked
        earlier = self._history.remember(asked)
        generation.timing.submitted_s = time.perf_counter()
        self.built.engine.submit(submit)
        edit = find_edit(asked, earlier, place_of)
        report = generation.reuse
        report.is_off = not self.plan.prefix_cache
        report.shared, report.edit, report.where = edit.shared, edit.cause, edit.where
        return generation

    def _ended(self, generation: Generation) -> None:
        """Engine's thread: an answer is whole; later prompts may hold it."""
        asked = generation.asked
        if asked is not None and generation.token_ids:
            self._history.answered(asked, generation.token_ids)
        elif asked is not None:
            self._history.forget(asked)

    def _encode(self, conversation: Conversation, params: GenerateParams) -> Prompt:
        """Render with the thinking that the request wishes, else the server's."""
        thinking = params.thinking or cast(Thinking, self.options.thinking)
        budget = (
            params.thinking_budget if params.thinking_budget is not None else self.options.thinking_budget
        )
        try:
            return self.codec.encode(conversation, thinking=thinking, thinking_budget=budget)
        except RecursionError as e:
            raise RequestError(
                "Tool arguments or schemas are nested too deeply.",
                code="invalid_content",
                hint="Send flatter JSON.",
                param="messages",
            ) from e

    def _constrained(
        self, conversation: Conversation, params: GenerateParams, prompt: Prompt
    ) -> TokenConstraint | None:
        """The form that the answer must have, compiled; RequestError if it can't be enforced."""
        thinks = params.thinking or self.options.thinking
        may_think = thinks != "off" if conversation.thinking is None else conversation.thinking
        assert self._constraints is not None
        return self._constraints.make(conversation, prompt, may_think=may_think)

    def _check_length(self, used: int, params: GenerateParams, param: str) -> None:
        """The prompt and at least one token, or all that is wished explicitly, must fit the context."""
        if params.max_tokens is not None and params.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {params.max_tokens}, an answer has at least one token.",
                code="out_of_range",
                hint="Leave it out for an answer of any length.",
                param="max_tokens",
            )
        limit, max_tokens = self.plan.max_model_len, None if params.clip_max_tokens else params.max_tokens
        if used + (max_tokens or 1) > limit:
            raise ContextLengthError(used, limit, max_tokens=max_tokens or 0, param=param)
        if not used:
            raise RequestError(
                "The prompt is empty.", code="empty_prompt", hint="Send at least one token.", param=param
            )

    def _check_ids(self, ids: Collection[int] | NDArray[np.int32], param: str = "prompt") -> None:
        vocab = self.built.config.vocab_size
        wrong = next((int(i) for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise RequestError(
                f"There is no token {wrong}.",
                code="invalid_token_id",
                hint=f"Ids of this model lie in 0..{vocab - 1}.",
                param=param,
            )

    def _sampling(
        self, p: GenerateParams, num_prompt: int, think: ThinkBudget | None, stop_ids: tuple[int, ...]
    ) -> SamplingParams:
        """Fill in what the caller left open: the model's generation_config, then neutral values."""
        given = self.built.generation_defaults
        self._check_ids(p.logit_bias, "logit_bias")

        def pick(value: float | None, name: str, neutral: float) -> float:
            return value if value is not None else given.get(name, neutral)

        temperature = pick(p.temperature, "temperature", 1.0)
        return SamplingParams(
            temperature=0.0 if temperature < LEAST_TEMPERATURE else temperature,
            top_k=int(pick(p.top_k, "top_k", 0)),
            top_p=pick(p.top_p, "top_p", 1.0),
            min_p=pick(p.min_p, "min_p", 0.0),
            presence_penalty=pick(p.presence_penalty, "presence_penalty", 0.0),
            frequency_penalty=pick(p.frequency_penalty, "frequency_penalty", 0.0),
            repetition_penalty=pick(p.repetition_penalty, "repetition_penalty", 1.0),
            logit_bias=tuple(p.logit_bias.items()),
            seed=p.seed if p.seed is not None else secrets.randbits(63),
            max_tokens=min(p.max_tokens or self.plan.max_output_tokens, self.plan.max_model_len - num_prompt),
            stop_ids=(*(() if p.ignore_eos else stop_ids), *p.stop_token_ids),
            ignore_eos=p.ignore_eos,
            logprobs=p.logprobs,
            think=think,
        )

    def _dispatch(self, outputs: list[Output]) -> None:
        """Engine's thread: queue a step's outputs, then wake each waiting loop once."""
        loops: dict[asyncio.AbstractEventLoop, list[Generation]] = {}
        for output in outputs:
            with self._lock:
                generation = self._live.get(output.request_id)
                if generation is not None and output.finish is not None:
                    del self._live[output.request_id]
            if generation is not None:
                loop = generation.put(output)
                if output.finish is not None:
                    self._ended(generation)
                if loop is not None:
                    loops.setdefault(loop, []).append(generation)
        for loop, generations in loops.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, generations)


def scripted(options: Options) -> tuple[Script | None, Options]:
    """Read `--model script:FILE`: the script, and options that load the demo model under its name."""
    if not (options.model or "").startswith(SCRIPT_PREFIX):
        return None, options
    path = Path(str(options.model)[len(SCRIPT_PREFIX) :])
    name = options.served_model_name or f"script-{path.stem}"
    return Script.from_file(path), replace(options, model=None, served_model_name=name)


def _check_trace_path(path: str | None) -> None:
    """A trace is written when all is over; a folder that takes none is found out before."""
    folder = Path(path).absolute().parent if path else None
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"The routing trace cannot be written to {path}.",
            code="unwritable_file",
            hint="Name a file in a folder that is there and that you may write to with --record-routing.",
            param="record_routing",
        )


def _close(llm: weakref.ref[LLM]) -> None:
    """At interpreter exit: a thread inside torch must not outlive it."""
    if (living := llm()) is not None:
        living.close()


def _wake(generations: list[Generation]) -> None:
    for generation in generations:
        generation.wake()


def build_llm(options: Options, progress: Progress = lambda phase, percent: None) -> LLM:
    """Load a model and start serving it in this process."""
    llm = LLM(options)
    llm.load(progress)
    return llm

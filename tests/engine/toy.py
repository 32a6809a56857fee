"""A toy model whose every answer proves that pages, states, rows and positions were right.

It writes token ids into KV pages and a running hash into its state; the next token is a function of
all ids read back from the pages, and of the state. A lost page, a stale state or a wrong position
gives another token than `expected`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from freetoken.cache.checkpoints import Checkpoints
from freetoken.cache.context_cache import ContextCache
from freetoken.cache.null import NullCache
from freetoken.cache.pages import UnitAllocator
from freetoken.core.batch import Batch
from freetoken.core.expert_stats import ExpertStats
from freetoken.core.interfaces import Device, ExpertBackend, Model, Routing
from freetoken.core.machine import preset
from freetoken.core.model_config import LayerSpec, ModelConfig, MoESpec
from freetoken.core.options import Options
from freetoken.core.prefix import PrefixCache
from freetoken.core.request import FinishReason, Output, SamplingParams, Submit
from freetoken.devices.cpu import CpuDevice
from freetoken.engine.budget import Sizes
from freetoken.engine.cold import ColdTier
from freetoken.engine.disk import DiskTier
from freetoken.engine.engine import Engine
from freetoken.engine.memory import Memory
from freetoken.engine.plan import Facts, make_plan
from freetoken.engine.reuse import Reuse
from freetoken.engine.runner import Runner
from freetoken.engine.sampler import Sampler
from freetoken.engine.scheduler import Limits, Scheduler
from freetoken.engine.states import StateMover

VOCAB, PAGE = 97, 4
EOS = 0

CONFIG = ModelConfig(
    family="toy", vocab_size=VOCAB, hidden_size=1, layers=(LayerSpec("full", "moe"),) * 2, max_position=4096,
    norm_eps=1e-6, tie_embeddings=True, dtype="float32", eos_ids=(EOS,), moe=MoESpec(2, 1, 8),
)  # fmt: skip


def mix(state: int, token: int) -> int:
    return (state * 31 + token + 7) % 1000003


def expected(prompt, steps: int, eos: bool = True) -> list[int]:
    """The tokens that a correct engine must give."""
    ids, out = [int(t) for t in prompt], []
    for _ in range(steps):
        state = 0
        for t in ids:
            state = mix(state, t)
        token = (state + sum(ids)) % VOCAB
        out.append(token)
        ids.append(token)
        if eos and token == EOS:
            break
    return out


class ToyExperts(ExpertBackend):
    """Routed output of zero, and a count of the calls."""

    name = "toy"

    def __init__(self, job_bytes: int = 0) -> None:
        self.stats = ExpertStats()
        self.job_bytes = job_bytes
        self.jobs_open = 0
        self._x = torch.empty(0)

    def begin(self, layer, x, routing, batch):
        self._x = x

    def finish(self, layer):
        return torch.zeros_like(self._x)

    def stream_layer(self, layer, x, routing):
        yield
        return torch.zeros_like(x)

    def begin_job(self, num_tokens):
        self.jobs_open += 1

    def end_job(self):
        self.jobs_open -= 1

    def absent_bytes(self, num_tokens):
        return self.job_bytes * num_tokens


class ToyModel(Model):
    """`kv` unit: PAGE int64 ids for each of two layers; `state` unit: one int64 hash a layer."""

    def __init__(self, kv, state) -> None:
        self.config = CONFIG
        self.kv, self.state = kv, state
        self.num_tokens = 0
        self.charge = lambda num_bytes, flops: None
        self.fail_at = -1
        self.nan_row_of = -1
        self.most_rows = 1 << 30
        self.forwards = 0

    def embed(self, batch: Batch):
        self.forwards += 1
        self.charge(1e7, 0.0)
        if self.forwards == self.fail_at:
            raise RuntimeError("injected")
        return batch.ids[:, None].double()

    def mix(self, layer: int, h, batch: Batch):
        """h float64 [T, 1]: after the last layer, the token that should follow each row."""
        if layer and batch.num_rows > self.most_rows:
            raise torch.OutOfMemoryError(f"{batch.num_rows} rows")
        pages = self.kv.view().view(torch.int64).view(-1, 2, PAGE)
        states = self.state.view().view(torch.int64).view(-1, 2)
        answers = torch.zeros_like(h)
        for b in range(len(batch.segments)):
            rows = range(batch.query_start[b], batch.query_start[b + 1])
            unit, saves = int(batch.state_ids[b]), dict(batch.segments[b].saves)
            self.num_tokens += len(rows) * (layer == 0)
            value = 0 if bool(batch.fresh[b]) else int(states[unit, layer])
            for row in rows:
                token, position = int(batch.ids[row]), int(batch.positions[row])
                pages[batch.page_table[b][position // PAGE], layer, position % PAGE] = token
                value = mix(value, token)
                ids = pages[batch.page_table[b][: position // PAGE + 1], layer].reshape(-1)[: position + 1]
                if position + 1 in saves:
                    states[saves[position + 1], layer] = value
                answers[row] = -1.0 if int(ids[0]) == self.nan_row_of else (value + int(ids.sum())) % VOCAB
            states[unit, layer] = value
        assert layer == 0 or torch.equal(h, answers), "layers disagree"
        return answers

    def route(self, layer, h, batch):
        ids = torch.zeros(len(h), 1, dtype=torch.int32)
        return h, Routing(ids, torch.ones(len(h), 1))

    def combine(self, layer, h, x, routed):
        return h + routed

    def dense(self, layer, h):
        return h

    def head(self, h, rows):
        chosen = range(len(h)) if rows is None else rows.tolist()
        logits = torch.zeros(len(chosen), VOCAB)
        for i, row in enumerate(chosen):
            answer = int(h[row])
            logits[i, answer] = 10.0 if answer >= 0 else float("nan")
        return logits


class Bench:
    """An engine around the toy, stepped by hand; `outputs` collects per request.

    slots    checkpoints in host memory; None: no prefix cache
    context  most tokens of a request; macro: of a job
    cold     bytes in host memory for what leaves the device; disk: a tier behind it
    """

    def __init__(
        self,
        pages: int = 64,
        device: Device | None = None,
        job_bytes: int = 0,
        slots: int | None = None,
        units: int = 3,
        model: type[ToyModel] = ToyModel,
        context: int = 1000,
        macro: int = 32,
        cold: int = 0,
        disk: DiskTier | None = None,
        **wishes,
    ) -> None:
        device = device or CpuDevice(memory_bytes=1 << 30)
        sizes = Sizes(0, 2 * PAGE * 8, PAGE, 16, 0, 0, 0)
        facts = Facts(
            model_name="toy", sizes=sizes, experts_per_token=2, expert_flops=1.0,
            max_position=max(context, 4096),
            device="cpu", owns_memory=False, in_host_memory=True, free_bytes=1 << 30, host_free_bytes=1 << 30,
            machine=preset("4090"), has_states=True, run_ahead=True, min_slots=4,
        )  # fmt: skip
        wishes = {"max_running_requests": 4, "max_prefill_length": 8, "run_ahead": True, **wishes}
        plan = make_plan(Options(**wishes), facts)
        plan = replace(plan, macro_tokens=macro, max_model_len=min(plan.max_model_len, context))
        running = plan.max_running
        kv = device.pool("kv", sizes.page_bytes, pages, min_units=1, max_units=pages * 2)
        units = 0 if slots is None else units
        count = running + 1 + units
        state = device.pool("state", 16, count, min_units=1, max_units=count)
        self.model, self.experts = model(kv, state), ToyExperts(job_bytes)
        self.model.charge = device.charge
        sampler = Sampler(running + 1, device.torch_device)
        runner = Runner(self.model, self.experts, device, sampler)
        runner.reserve(running, plan.chunk_tokens, context // PAGE + 50, PAGE)
        limits = Limits(running, plan.chunk_tokens, plan.macro_tokens, PAGE, plan.max_model_len)
        states = UnitAllocator("states", count)
        mover = StateMover(device, kv, state, slots or 0)
        self.cache: PrefixCache = NullCache()
        if slots is not None:
            store = ColdTier(device, kv, mover, cold, disk) if cold else None
            self.cache = ContextCache(PAGE, Checkpoints(states, units, slots, mover), store)
        reuse = Reuse(self.cache, UnitAllocator("pages", pages), states, mover, PAGE)
        self.scheduler = Scheduler(limits, reuse, wants_job=lambda n: self.experts.absent_bytes(n) > 8)
        memory = Memory(plan, sizes, device, kv, self.experts)
        self.engine = Engine(plan, self.scheduler, runner, memory, device, (EOS,))
        self.engine._sink = self._take
        self.outputs: dict[str, list[Output]] = {}

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def submit(self, name: str, prompt, anchors=(), anchor_ids=(), group="", **params) -> None:
        params = {"temperature": 0.0, "max_tokens": 12, **params}
        ids = np.asarray(prompt, np.int32)
        sampling = SamplingParams(**params)
        self.engine.submit(Submit(name, ids, sampling, tuple(anchors), tuple(anchor_ids), group))

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.read_inbox()
            if not self.engine.idle:
                self.engine.step()
            self.engine._hand_out()

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            self.steps()
            if self.engine.idle:
                return
        raise AssertionError("the engine never came to rest")

    def tokens(self, name: str) -> list[int]:
        return [t for o in self.outputs.get(name, []) for t in o.token_ids]

    def finish(self, name: str):
        return self.outputs[name][-1].finish

    def check_answers(self, prompts: Mapping[str, list[int]], aborted: set[str], steps: int) -> None:
        """Every answer is whole; of one that was cut off, the beginning is right."""
        for name, ids in prompts.items():
            whole, said = expected(ids, steps), self.tokens(name)
            if name in aborted and self.finish(name) is FinishReason.ABORT:
                whole = whole[: len(said)]
            assert said == whole, name
            assert sum(o.finish is not None for o in self.outputs[name]) == 1, name

    def check_empty(self) -> None:
        self.scheduler.check()
        s = self.scheduler
        s.reuse.clear()
        s.check()
        assert s.pages.num_used == s.states.num_used == s.rows.num_used == 0, "units leaked"
        assert self.experts.jobs_open == 0, "a job was left open"

"""The composition root: Options in, a running engine's parts out.

The one place that loads choices of other rooms by name. Order: read headers, find the device, plan,
refuse what can't fit, then allocate and read weights. Nothing large exists before the plan stands.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from freetoken import __version__
from freetoken.cache.checkpoints import Checkpoints
from freetoken.cache.context_cache import ContextCache
from freetoken.cache.null import NullCache
from freetoken.cache.pages import UnitAllocator
from freetoken.chat.codec import ChatCodec
from freetoken.core import choices, collector, env
from freetoken.core.errors import FreeTokenError, WeightsError
from freetoken.core.interfaces import (
    Device,
    ExpertBackend,
    Model,
    Pool,
)
from freetoken.core.log import logger
from freetoken.core.model_config import ModelConfig
from freetoken.core.options import Options
from freetoken.core.prefix import PrefixCache
from freetoken.core.stopwatch import Stopwatch
from freetoken.core.units import MIB
from freetoken.engine import programs
from freetoken.engine.banks import Filling, make_bank
from freetoken.engine.cold import ColdTier
from freetoken.engine.disk import DiskTier, fingerprint
from freetoken.engine.engine import Engine
from freetoken.engine.heat import Heat
from freetoken.engine.memory import Memory
from freetoken.engine.plan import Facts, Plan, make_plan
from freetoken.engine.reuse import Reuse
from freetoken.engine.runner import Runner
from freetoken.engine.sampler import Sampler
from freetoken.engine.scheduler import Limits, Scheduler
from freetoken.engine.states import StateMover
from freetoken.engine.survey import Parts, Progress, check_kv_dtype, gather_facts, survey
from freetoken.engine.threads import ThreadTrial, candidates
from freetoken.experts.backends._none import NoExperts
from freetoken.experts.setup import ExpertSetup
from freetoken.native.library import library
from freetoken.native.topology import default_threads, quota
from freetoken.weights.files import Files
from freetoken.weights.load import Checkpoint, open_checkpoint
from freetoken.weights.read_ahead import ReadAhead

log = logger("build")
DEMO_MODEL = Path(__file__).resolve().parent.parent / "data" / "demo-model"
DEMO_NAME = "freetoken-demo"
SMALL_MODEL_BYTES = 256 * MIB
"""Below this a step's operations are too short to share: one thread is faster, and a busy neighbour does
not make every operation wait for a thread that has lost its core (measured: 7 s instead of 0.3 s)."""
GENERATION_KEYS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 1 << 31),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
"""Sampling defaults that a checkpoint may bring, and what they may be."""


@dataclass(frozen=True)
class Built:
    """A loaded model's parts; `engine` is not started yet.

    filling   brings the experts, maybe still while the engine serves; None for a model without
    watch     what the start took, by part
    """

    engine: Engine
    codec: ChatCodec
    config: ModelConfig
    device: Device
    generation_defaults: Mapping[str, float]
    filling: Filling | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def plan(self) -> Plan:
        return self.engine.plan

    @property
    def percent(self) -> int:
        """How many of the experts are there."""
        return self.filling.percent if self.filling else 100

    @property
    def error(self) -> FreeTokenError | None:
        """What keeps it from serving on: the engine's error, or that of reading experts."""
        error = self.engine.error or (self.filling.error if self.filling else None)
        if error is None or isinstance(error, FreeTokenError):
            return error
        return WeightsError(f"Reading experts failed: {error}.", hint="Load the model again.")

    def close(self) -> None:
        """Stop reading and serving. Idempotent."""
        if self.filling is not None:
            self.filling.stop()
        self.engine.close()

    def snapshot(self) -> dict[str, Any]:
        """Counters and memory as nested plain numbers."""
        e = self.engine
        kv, running, moved = e.scheduler.pages, e.scheduler, e.scheduler.reuse.mover
        return {
            "engine": {
                **e.stats.snapshot(),
                "running": len(running.running),
                "waiting": len(running.waiting),
            },
            "cache": {
                **e.scheduler.reuse.snapshot(),
                "bytes": e.scheduler.reuse.cache.num_slots * e.memory.state_bytes,
                "state_saved_bytes": moved.saved_bytes,
                "state_loaded_bytes": moved.loaded_bytes,
            },
            "experts": asdict(e.runner.experts.stats),
            "memory": {
                "budget_bytes": e.memory.budget_bytes,
                "planned_bytes": e.memory.budget_bytes + e.memory.unplanned_bytes + self.device.beside_bytes,
                "taken_bytes": self.device.taken_bytes(),
                "kv_pages_used": kv.num_used,
                "kv_pages": kv.num_units - 1,
                "page_size": e.plan.page_size,
                "slots": max(e.memory.num_slots - 1, 0),
            },
            "device": self.device.name,
            "backend": e.plan.backend,
            "policy": e.plan.policy,
            "clock_s": self.device.clock.now(),
            "start_s": {name: round(seconds, 4) for name, seconds in self._start_s().items()},
        }

    def _start_s(self) -> dict[str, float]:
        """Parts of the start one after the other; pin, fill and capture ran beside or within them."""
        beside = {"pin": self.filling.pin_s, "fill": self.filling.fill_s} if self.filling else {}
        return {**self.watch.seconds, **beside, "capture": self.engine.runner.capture_s}


def build(
    options: Options,
    progress: Progress = lambda phase, percent: None,
    *,
    early: bool = False,
    files: Files | None = None,
    device: Device | None = None,
    heat: Path | None = None,
) -> Built:
    """Load a model: ConfigError, WeightsError or CapacityError before anything large is allocated.

    early   return while experts are still being read: a step waits for those that it needs
    files   how the checkpoint's bytes are read (default: past the page cache, unless they lie in it)
    device  where to compute (default: what the options say)
    heat    a folder in which it is kept which experts are asked for first; the next start reads them first
    """
    progress("reading headers", 0)
    path, watch = Path(options.model) if options.model else DEMO_MODEL, Stopwatch()
    with watch.part("headers"), collector.paused():
        checkpoint = open_checkpoint(path, files)
    with watch.part("text"):
        codec = _codec(options, checkpoint)
    with collector.paused():
        parts = survey(options, checkpoint, progress, device, watch)
    check_kv_dtype(parts)
    with watch.part("plan"):
        facts = gather_facts(parts, path.name if options.model else DEMO_NAME)
        plan = make_plan(options, facts)
    torch.set_num_threads(_threads(options, facts))
    with watch.part("bank"):
        filling = _filling(parts, heat)
    try:
        engine = _engine(parts, plan, facts, filling)
        if filling is None:
            checkpoint.close()
        elif not early:
            with watch.part("experts"):
                filling.wait(lambda percent: progress("reading experts", 10 + 89 * percent // 100))
    except BaseException:
        if filling is not None:
            filling.stop()
        raise
    progress("ready", 100)
    defaults = _generation_defaults(checkpoint.generation)
    return Built(engine, codec, parts.config, parts.device, defaults, filling, watch)


def _filling(parts: Parts, folder: Path | None) -> Filling | None:
    """The empty bank and who will fill it; None for a model without routed experts."""
    checkpoint = parts.checkpoint
    if not parts.formats or parts.config.moe is None:
        return None
    bank, heat = make_bank(parts.config, parts.formats, checkpoint.records), None
    if folder is not None:
        heat = Heat(folder, fingerprint(checkpoint.path), bank.num_layers * bank.num_experts)
    return Filling(parts.family, parts.config, checkpoint, bank, parts.device, heat)


def _codec(options: Options, checkpoint: Checkpoint) -> ChatCodec:
    """The text side, from the header of a GGUF file or from the files of a directory."""
    if checkpoint.metadata:
        return ChatCodec.from_gguf(checkpoint.metadata, options.tool_parser, drop_nonces=options.drop_nonces)
    return ChatCodec.from_directory(checkpoint.path, options.tool_parser, drop_nonces=options.drop_nonces)


def _threads(options: Options, facts: Facts) -> int:
    """Threads of one torch operation."""
    model_bytes = facts.sizes.dense_bytes + facts.sizes.num_experts * facts.sizes.record_bytes
    if options.moe_cpu_threads:
        return min(options.moe_cpu_threads, _usable_cpus())
    return 1 if model_bytes < SMALL_MODEL_BYTES else min(psutil.cpu_count(logical=False) or 1, _usable_cpus())


def _thread_trial(parts: Parts, facts: Facts) -> ThreadTrial | None:
    """Find the number of threads by steps, where the CPU alone computes and nobody has said it."""
    lib = library()
    if lib is None or parts.options.moe_cpu_threads or not programs.supported(parts.device):
        return None
    if _threads(parts.options, facts) == 1:
        return None
    return ThreadTrial(candidates(min(default_threads(), _usable_cpus())), lib.start)


def _usable_cpus() -> int:
    """CPUs that this process may run on; a container or taskset may allow few of the machine's."""
    if sys.platform == "linux":
        return min(len(psutil.Process().cpu_affinity()), quota())
    return psutil.cpu_count() or 1


def _experts(parts: Parts, plan: Plan, filling: Filling | None) -> ExpertBackend:
    """Put the chosen backend around the bank."""
    options, config = parts.options, parts.config
    if filling is None:
        return NoExperts()
    policy = choices.load("freetoken.experts.policies", plan.policy).POLICY()
    setup = ExpertSetup(
        config=config,
        bank=filling.bank,
        device=parts.device,
        numerics=parts.numerics,
        policy=policy,
        num_slots=max(plan.memory.num_slots - 1, 0),
        max_slots=max(plan.max_slots - 1, 0),
        threads=min(options.moe_cpu_threads or default_threads(), _usable_cpus()),
        steady=bool(options.moe_cpu_threads),
        cpu_layers=options.moe_cpu_layers or 0,
        max_fetch=options.moe_hybrid_max_fetch or 0,
        prefetch=options.moe_prefetch,
        overlap=not options.disable_moe_prefill_overlap,
        max_rows=plan.max_running + plan.chunk_tokens,
        chunk_tokens=plan.chunk_tokens,
    )
    backend: ExpertBackend = choices.load("freetoken.experts.backends", plan.backend).create(setup)
    return backend


def _engine(parts: Parts, plan: Plan, facts: Facts, filling: Filling | None) -> Engine:
    device, watch = parts.device, parts.watch
    sizes, memory = facts.sizes, plan.memory
    kv = device.pool("kv", sizes.page_bytes, memory.num_pages, min_units=2, max_units=plan.max_pages)
    pools: dict[str, Pool] = {"kv": kv}
    if facts.has_states:
        states = memory.num_states
        pools["state"] = device.pool("state", sizes.state_bytes, states, min_units=states, max_units=states)
    parts.progress("reading dense weights", 5)
    # Its kernels read the bank without asking whether a record is there, so nothing runs before all are.
    needs_all = filling is not None and not device.in_host_memory
    with contextlib.ExitStack() as beside:
        if filling is not None and needs_all:
            beside.enter_context(filling.kept_open())
            filling.start(pins=plan.backend != "cpu")
        with watch.part("dense"):
            model = _dense(parts, pools)
    parts.progress("reading experts", 10)
    if filling is not None and not needs_all:
        filling.start(pins=plan.backend != "cpu")
    elif filling is not None:
        with watch.part("experts"):
            filling.wait(lambda percent: parts.progress("reading experts", 10 + 80 * percent // 100))
    with watch.part("backend"):
        experts = _experts(parts, plan, filling)
        sampler = Sampler(plan.max_running + 1, device.torch_device)
        runner = Runner(model, experts, device, sampler, _thread_trial(parts, facts))
        max_pages = plan.max_model_len // plan.page_size + 2
        runner.reserve(plan.max_running, plan.chunk_tokens, max_pages, plan.page_size)

    def wants_job(tokens: int) -> bool:
        """A prefill that would pull much over the link, or pull it once per chunk, goes layer by layer."""
        absent = experts.absent_bytes(tokens)
        return absent > 0 and (
            tokens > plan.chunk_tokens or absent > device.machine.link_bw * plan.prefill_gap_s
        )

    live = Memory(plan, sizes, device, kv, experts)

    def grow_pages(pages: int, *, spare: bool = False) -> bool:
        return live.grow_pages(scheduler, pages, spare=spare)

    scheduler: Scheduler = Scheduler(
        Limits(plan.max_running, plan.chunk_tokens, plan.macro_tokens, plan.page_size, plan.max_model_len),
        _reuse(parts, plan, pools),
        wants_job=wants_job,
        grow_pages=grow_pages,
    )
    generation = parts.checkpoint.generation
    eos_ids = tuple(dict.fromkeys([*parts.config.eos_ids, *_ids(generation.get("eos_token_id"))]))
    return Engine(plan, scheduler, runner, live, device, eos_ids)


def _dense(parts: Parts, pools: Mapping[str, Pool]) -> Model:
    """The model without its experts."""
    source = ReadAhead(parts.checkpoint.source, parts.checkpoint.files)
    try:
        return parts.family.build(parts.config, source, parts.device, parts.numerics, pools)
    finally:
        source.close()


def _reuse(parts: Parts, plan: Plan, pools: Mapping[str, Pool]) -> Reuse:
    """The prefix cache, and who moves its bytes."""
    memory, device = plan.memory, parts.device
    states = UnitAllocator("states", memory.num_states)
    mover = StateMover(device, pools["kv"], pools.get("state"), plan.checkpoint_slots)
    cache: PrefixCache = NullCache()
    if plan.prefix_cache:
        checkpoints = None
        if "state" in pools:
            checkpoints = Checkpoints(states, plan.checkpoint_units, plan.checkpoint_slots, mover)
        cache = ContextCache(plan.page_size, checkpoints, _cold_store(parts, plan, pools["kv"], mover))
    return Reuse(cache, UnitAllocator("KV pages", memory.num_pages), states, mover, plan.page_size)


def _cold_store(parts: Parts, plan: Plan, kv: Pool, mover: StateMover) -> ColdTier | None:
    """Where prefixes go that leave the device, if anywhere."""
    if not plan.cold_bytes:
        return None
    disk = None
    if plan.disk_bytes:
        options, where = parts.options, parts.checkpoint.path
        folder = Path(options.cold_path) if options.cold_path else env.home() / "prefixes"
        layout = (plan.device, plan.page_size, kv.unit_bytes, mover.host.shape[1], str(parts.numerics))
        mark = "|".join(map(str, (__version__, *layout, *fingerprint(where))))
        disk = DiskTier(folder, mark, plan.disk_bytes)
    return ColdTier(parts.device, kv, mover, plan.cold_bytes, disk)


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _generation_defaults(raw: Mapping[str, Any]) -> dict[str, float]:
    """The checkpoint's own sampling defaults; a config that doesn't sample is greedy."""
    for key, (least, most) in GENERATION_KEYS.items():
        value = raw.get(key)
        if isinstance(value, int | float) and not least <= value <= most:
            raise WeightsError(
                f"generation_config.json: {key} is {value}, allowed are {least} to {most}.",
                code="invalid_model_config",
                hint="Correct the file, or remove the line.",
            )
    given = {k: float(raw[k]) for k in GENERATION_KEYS if isinstance(raw.get(k), int | float)}
    if raw.get("do_sample") is False:
        given["temperature"] = 0.0
    return given

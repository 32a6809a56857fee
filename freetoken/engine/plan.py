"""Options -> Plan: every decision about memory and placement, taken once, with its reason.

Pure: takes wishes and measured facts, returns a frozen Plan. Nobody writes to a Plan; a live resize
makes a new one. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.core.errors import CapacityError, ConfigError
from freetoken.core.machine import Machine
from freetoken.core.options import Options
from freetoken.core.units import MIB, format_bytes
from freetoken.engine.budget import Demand, Division, Sizes, divide, host_too_small, pages_for

KV_FLOOR_TOKENS = 8192
FUSED_KV_TOKENS = 32768
HOST_KV_SHARE = 0.25
HOST_ROOM = 64 * MIB
"""Host memory that no plan gives away: what reading a checkpoint and answering requests take on the way."""
DEFAULT_RUNNING, LEAST_RUNNING = 32, 2
STATES_SHARE = 8
"""States of requests take at most this part of what weights leave, where nobody says how many there are."""
GROWN_CONTEXTS = 4
"""Address range of the KV pool, in whole contexts: what it may grow to out of expert slots."""
LRU_MIN_CYCLES = 1.5
CHECKPOINT_UNITS = 8
"""Most device states that checkpoints pass through; at least two, else a fiftieth of device memory."""
CHECKPOINT_SLOTS = 1024
CHECKPOINT_HOST_SHARE = 8
DISK_BUFFER_BYTES = 64 << 20
"""Host memory through which prefixes go to disk where nobody gave them more."""
DEFAULT_POLICY = "two_speed"
"""The fewest misses of all live policies on every recorded trace (docs/notes/policy-replay.md)."""


HostParts = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Facts:
    """What was found: the model's sizes, the device's and the host's memory.

    owns_memory   the device has memory of its own behind a link
    notes         decisions that were taken while reading headers
    large_memory  activations of tens of thousands of tokens don't matter beside the rest
    min_slots     fewest usable slots that a prefill ring and one fill need
    in_host_memory  the device's memory is host memory
    host_computes   the host can take a share of what the device misses
    free_bytes    device memory that may be used (host memory where owns_memory is False)
    """

    model_name: str
    sizes: Sizes
    experts_per_token: int
    expert_flops: float
    max_position: int
    device: str
    owns_memory: bool
    in_host_memory: bool
    free_bytes: int
    host_free_bytes: int
    machine: Machine
    has_states: bool
    run_ahead: bool
    min_slots: int
    large_memory: bool = False
    host_limited_by: str = "RAM"
    host_computes: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The frozen outcome. Token limits in tokens, pool sizes in units including each dummy.

    host_parts   (what, bytes) of all that serving takes of host memory beyond what importing took
    checkpoint_units, checkpoint_slots   saved recurrent states on the device and in host memory
    cold_bytes, disk_bytes               what left the device: in host memory, and on disk
    """

    model_name: str
    device: str
    machine: str
    backend: str
    policy: str
    memory: Division
    min_pages: int
    max_pages: int
    max_slots: int
    min_slots: int
    page_size: int
    max_model_len: int
    max_running: int
    chunk_tokens: int
    macro_tokens: int
    max_output_tokens: int
    prefill_gap_s: float
    run_ahead: bool
    exact: bool
    host_parts: HostParts
    prefix_cache: bool
    checkpoint_units: int
    checkpoint_slots: int
    cold_bytes: int
    disk_bytes: int
    reasons: tuple[str, ...]

    @property
    def kv_tokens(self) -> int:
        return (self.memory.num_pages - 1) * self.page_size

    @property
    def host_bytes(self) -> int:
        """Most host memory that serving may take beyond what importing took."""
        return sum(size for _, size in self.host_parts)

    def lines(self) -> list[str]:
        """The plan for people: decisions first, then where the memory goes."""
        pool = (
            f", {self.memory.num_slots - 1} expert slots ({self.policy})" if self.memory.num_slots > 1 else ""
        )
        head = (
            f"{self.backend} on {self.device}: {self.kv_tokens} KV tokens, {self.max_running} requests{pool}"
        )
        return [
            head,
            *self.reasons,
            f"memory: {self.memory}",
            f"host memory: {format_bytes(self.host_bytes)}: "
            + " + ".join(f"{what} {format_bytes(size)}" for what, size in self.host_parts if size),
        ]


def make_plan(options: Options, facts: Facts) -> Plan:
    """Decide everything. ConfigError for contradictions, CapacityError with the sum if it can't fit."""
    reasons: list[str] = [*facts.notes]
    page_size = facts.sizes.page_size
    _check_contradictions(options)
    limit = _context_limit(options, facts, reasons)
    _check_slots(options, facts)
    running = _running(options, facts)
    if running < (options.max_running_requests or DEFAULT_RUNNING):
        size = format_bytes(facts.sizes.state_bytes)
        reasons.append(f"{running} requests at once: each has a state of {size} on the device")
    chunk = options.max_prefill_length or default_chunk(facts.owns_memory, facts.large_memory)
    backend = _backend(options, facts, running, limit, reasons)
    states = running + 1 if facts.has_states else 1
    units, slots = _checkpoints(options, facts, reasons)
    states += units
    cold, disk = _cold(options, facts, reasons)
    if facts.owns_memory:
        demand = _device_demand(options, facts, backend, states, limit)
        memory = divide(facts.free_bytes, facts.sizes, demand)
    else:
        demand = _host_demand(options, facts, states, slots, limit, reasons)
        memory = divide(max(facts.host_free_bytes - HOST_ROOM, 0), without_slots(facts.sizes), demand)
    if facts.owns_memory and (memory.num_pages - 1) * page_size < limit:
        reasons.append(
            f"context {limit}: KV grows out of expert slots beyond {(memory.num_pages - 1) * page_size}"
        )
    host_parts = _host_parts(facts, memory, slots)
    reasons += _unused(options, facts, backend)
    return Plan(
        model_name=options.served_model_name or facts.model_name,
        device=facts.device,
        machine=facts.machine.name,
        backend=backend,
        policy=_policy(options, facts, memory, backend, reasons),
        memory=memory,
        min_pages=min(memory.num_pages, pages_for(_kv_floor(options, limit), page_size)),
        max_pages=_most_pages(facts, memory, host_parts, limit * min(running, GROWN_CONTEXTS)),
        max_slots=facts.sizes.num_experts + 1 if memory.num_slots > 1 else 1,
        min_slots=min(facts.sizes.num_experts, facts.min_slots) + 1,
        page_size=page_size,
        max_model_len=limit,
        max_running=running,
        chunk_tokens=chunk,
        macro_tokens=max(chunk, macro_tokens(facts.large_memory)),
        max_output_tokens=options.max_output_tokens or limit,
        prefill_gap_s=(options.prefill_gap_ms if options.prefill_gap_ms is not None else 50.0) / 1000,
        run_ahead=facts.run_ahead if options.run_ahead is None else options.run_ahead,
        exact=options.exact,
        host_parts=host_parts,
        prefix_cache=options.prefix_cache,
        checkpoint_units=units,
        checkpoint_slots=slots,
        cold_bytes=cold,
        disk_bytes=disk,
        reasons=tuple(reasons),
    )


def _checkpoints(options: Options, facts: Facts, reasons: list[str]) -> tuple[int, int]:
    """Device units and host slots for saved states; none for models that can resume anywhere."""
    sizes = facts.sizes
    if not options.prefix_cache:
        reasons.append("no prefix cache: every prompt is computed whole")
        return 0, 0
    text = f"prefix cache: pages of {sizes.page_size} tokens"
    if not (facts.has_states and sizes.state_bytes):
        reasons.append(text)
        return 0, 0
    units = max(2, min(CHECKPOINT_UNITS, facts.free_bytes // 50 // sizes.state_bytes))
    if options.checkpoint_memory is not None:
        slots = options.checkpoint_memory // sizes.state_bytes
    else:
        slots = min(
            CHECKPOINT_SLOTS, max(_left(options, facts), 0) // CHECKPOINT_HOST_SHARE // sizes.state_bytes
        )
    size = format_bytes(sizes.state_bytes)
    reasons.append(f"{text}, {slots} states of {size} in host memory, {units} on their way there")
    return units, slots


def _cold(options: Options, facts: Facts, reasons: list[str]) -> tuple[int, int]:
    """Bytes of host memory and disk for what leaves the device; where that is host memory, on request."""
    if not options.prefix_cache:
        return 0, 0
    disk = options.cold_disk
    if options.cold_memory is not None:
        cold = options.cold_memory
    elif facts.owns_memory and not facts.in_host_memory:
        free = facts.host_free_bytes - facts.sizes.num_experts * facts.sizes.record_bytes
        cold = max(free, 0) // CHECKPOINT_HOST_SHARE
    else:
        cold = DISK_BUFFER_BYTES if disk else 0
    if cold or disk:
        on_disk = f", {format_bytes(disk)} on disk" if disk else ""
        reasons.append(f"prefixes that leave the device: {format_bytes(cold)} of host memory{on_disk}")
    return cold, disk


def _unused(options: Options, facts: Facts, backend: str) -> list[str]:
    """One line for each wish that has no meaning with this device and backend."""
    needs_slots = (
        "moe_cache_size", "moe_cache_rate", "moe_hybrid_max_fetch", "moe_prefetch",
        "disable_moe_prefill_overlap",
    )  # fmt: skip
    needs_memory = ("gpu_memory", "memory_ratio")
    needs_machine = ("sim_link_bw", "sim_host_bw")
    idle: list[tuple[str, str]] = []
    if backend not in ("offload", "hybrid"):
        idle += [(name, f"backend {backend} has no expert slots to choose") for name in needs_slots]
    if not facts.owns_memory:
        idle += [(name, f"{facts.device} has no memory of its own") for name in needs_memory]
        idle += [(name, "nothing is simulated") for name in needs_machine]
    return [f"--{name.replace('_', '-')} is not used: {why}" for name, why in idle if getattr(options, name)]


def _beside(facts: Facts) -> HostParts:
    """What lies in host memory whatever is served: all experts, and dense weights without another place."""
    dense = 0 if facts.owns_memory else facts.sizes.dense_bytes
    return ("experts", facts.sizes.pool_bytes), ("dense weights", dense)


def _left(options: Options, facts: Facts) -> int:
    """Host memory that is left for KV and saved states."""
    sizes = facts.sizes
    fixed = sum(size for _, size in _beside(facts)) + HOST_ROOM
    if not facts.owns_memory:
        fixed += (
            sizes.activation_bytes + (_running(options, facts) + 1 + CHECKPOINT_UNITS) * sizes.state_bytes
        )
    return facts.host_free_bytes - fixed


def _host_parts(facts: Facts, memory: Division, saved: int) -> HostParts:
    """All that serving takes of host memory; CapacityError if there is not so much."""
    parts = [*_beside(facts), *(memory.parts() if facts.in_host_memory else ()), _saved(facts, saved)]
    if sum(size for _, size in parts) > facts.host_free_bytes:
        raise host_too_small(parts, facts.host_free_bytes, facts.host_limited_by)
    return tuple(parts)


def _saved(facts: Facts, count: int) -> tuple[str, int]:
    return f"{count} saved states", count * facts.sizes.state_bytes


def _check_contradictions(options: Options) -> None:
    """Two wishes for one thing: neither is dropped in silence."""
    wrong = ""
    if options.exact and options.dtype not in (None, "float32"):
        wrong = f"--exact computes in float32, --dtype says {options.dtype}"
    elif options.moe_cache_size is not None and options.moe_cache_rate is not None:
        wrong = "--moe-cache-size and --moe-cache-rate both say how many expert slots there are"
    if wrong:
        raise ConfigError(f"{wrong}.", code="invalid_option", hint="Leave one of the two out.")


def _check_slots(options: Options, facts: Facts) -> None:
    wanted, experts = options.moe_cache_size or 0, facts.sizes.num_experts
    if wanted > experts:
        raise CapacityError(
            f"{wanted} expert slots wanted, the model has {experts} experts.",
            code="too_many_slots",
            hint=f"Use --moe-cache-size {experts} or less.",
        )


def _context_limit(options: Options, facts: Facts, reasons: list[str]) -> int:
    limit = options.max_model_len or facts.max_position
    if limit > facts.max_position:
        raise ConfigError(
            f"max_model_len {limit} is beyond the model's {facts.max_position} positions.",
            code="invalid_option",
            hint=f"Use --max-model-len {facts.max_position} or less.",
            param="max_model_len",
        )
    if options.num_tokens is not None and options.num_tokens < limit:
        reasons.append(f"context {options.num_tokens}: --num-tokens holds no more")
        limit = options.num_tokens
    return limit


def _backend(options: Options, facts: Facts, running: int, limit: int, reasons: list[str]) -> str:
    wish = options.moe_backend
    if not facts.owns_memory:
        if wish in ("offload", "hybrid"):
            raise ConfigError(
                f"--moe-backend {wish} needs a device with its own memory; {facts.device} shares the host's.",
                code="backend_needs_gpu",
                hint="Use --moe-backend cpu or fused, or try it with --device sim.",
            )
        if wish == "auto":
            reasons.append("backend cpu: no GPU, all experts are computed where they lie")
            return "cpu"
        return wish
    if wish != "auto":
        return wish
    sizes = facts.sizes
    pool = sizes.num_experts * sizes.record_bytes
    asked = _slots_asked(options, facts)
    if asked is not None and asked < sizes.num_experts:
        return _split_backend(facts, f"{asked} of {sizes.num_experts} experts have slots, as asked", reasons)
    states = (running + 1 if facts.has_states else 1) * sizes.state_bytes
    kv = pages_for(min(limit, FUSED_KV_TOKENS), sizes.page_size) * sizes.page_bytes
    if pool + sizes.dense_bytes + sizes.activation_bytes + states + kv <= facts.free_bytes:
        reasons.append(f"backend fused: all experts ({format_bytes(pool)}) fit beside 32k tokens of KV")
        return "fused"
    return _split_backend(facts, f"pool {format_bytes(pool)} exceeds GPU memory", reasons)


def _split_backend(facts: Facts, why: str, reasons: list[str]) -> str:
    """offload or hybrid, by the time of one layer's typical misses under the measured rates.

    A layer misses a quarter of its routed experts; hybrid shares them between link and CPU at the
    rates that both reach together and pays the CPU round trip.
    """
    m = facts.machine
    top_k_bytes = facts.sizes.record_bytes * 2.0
    offload = m.fill_fixed_s + top_k_bytes / m.link_bw
    together = m.link_bw + max(m.host_bw - m.link_bw, 0.25 * m.host_bw)
    hybrid = max(m.fill_fixed_s, m.cpu_fixed_s) + top_k_bytes / together
    better = "hybrid" if hybrid < 0.97 * offload else "offload"
    if better == "hybrid" and not facts.host_computes:
        reasons.append("backend offload: the native library does not compute experts in this format")
        return "offload"
    reasons.append(
        f"backend {better}: {why}; two misses take "
        f"{offload * 1e6:.0f} us over the link, {hybrid * 1e6:.0f} us shared with the CPU"
    )
    return better


def _device_demand(options: Options, facts: Facts, backend: str, states: int, limit: int) -> Demand:
    sizes = facts.sizes
    floor = _kv_floor(options, limit)
    total = sizes.num_experts + 1
    slots: int | None = None
    if backend == "fused":
        slots = total
    elif backend == "cpu":
        slots = 1
    elif (asked := _slots_asked(options, facts)) is not None:
        slots = asked + 1
    return Demand(
        num_states=states,
        min_pages=pages_for(floor, sizes.page_size),
        max_pages=pages_for(options.num_tokens or limit, sizes.page_size),
        num_slots=slots,
        min_slots=min(total, facts.min_slots + 1),
    )


def _most_pages(facts: Facts, memory: Division, host_parts: HostParts, tokens: int) -> int:
    """Address range of the KV pool; in host memory never more than that could hold."""
    most = pages_for(tokens, facts.sizes.page_size)
    if not facts.owns_memory:
        spare = facts.host_free_bytes - HOST_ROOM - sum(size for _, size in host_parts)
        most = min(most, memory.num_pages + max(spare, 0) // max(facts.sizes.page_bytes, 1))
    return max(memory.num_pages, most)


def _kv_floor(options: Options, limit: int) -> int:
    """KV tokens that expert slots never get."""
    wish = options.kv_reserve_tokens
    return options.num_tokens or max(min(KV_FLOOR_TOKENS if wish is None else wish, limit), 1)


def _host_demand(
    options: Options, facts: Facts, states: int, saved: int, limit: int, reasons: list[str]
) -> Demand:
    """On shared memory KV takes a share of what weights leave; nothing else competes but the page cache."""
    sizes = facts.sizes
    beside = (*_beside(facts), _saved(facts, saved))
    if options.num_tokens is not None:
        pages = pages_for(options.num_tokens, sizes.page_size)
        return Demand(states, pages, pages, 0, 0, beside, facts.host_limited_by)
    wanted = pages_for(limit * max(2, min(_running(options, facts), 4)), sizes.page_size)
    share = min(facts.host_free_bytes * HOST_KV_SHARE, _left(options, facts) / 2)
    pages = min(wanted, max(int(share) // max(sizes.page_bytes, 1), pages_for(1, sizes.page_size)))
    reasons.append(
        f"KV {(pages - 1) * sizes.page_size} tokens: at most a quarter of free host memory, "
        "and half of what the weights leave"
    )
    least = min(pages, pages_for(limit, sizes.page_size))
    return Demand(states, least, pages, 0, 0, beside, facts.host_limited_by)


def default_chunk(owns_memory: bool, large_memory: bool = False) -> int:
    """Tokens of a prefill sub-chunk if nobody says: a GPU needs many rows to be busy, a CPU doesn't."""
    if large_memory:
        return 8192
    return 2048 if owns_memory else 512


def macro_tokens(large_memory: bool) -> int:
    """Tokens that pass through the layers together, so that the pool crosses the link once for all."""
    return 32768 if large_memory else 8192


def _running(options: Options, facts: Facts) -> int:
    """Requests at once: as many as asked for, else 32, fewer on a small card where each has a state."""
    if options.max_running_requests:
        return options.max_running_requests
    sizes = facts.sizes
    if not (facts.owns_memory and facts.has_states and sizes.state_bytes):
        return DEFAULT_RUNNING
    share = (facts.free_bytes - sizes.dense_bytes - sizes.activation_bytes) // STATES_SHARE
    return max(LEAST_RUNNING, min(DEFAULT_RUNNING, share // sizes.state_bytes - 1))


def _slots_asked(options: Options, facts: Facts) -> int | None:
    """Expert slots that somebody asked for; None: as many as fit."""
    if options.moe_cache_size is not None:
        return options.moe_cache_size
    if options.moe_cache_rate is not None:
        return max(round(facts.sizes.num_experts * options.moe_cache_rate), 1)
    return None


def without_slots(sizes: Sizes) -> Sizes:
    """The bank is host memory already; nothing is copied into slots."""
    return Sizes(
        dense_bytes=0,
        page_bytes=sizes.page_bytes,
        page_size=sizes.page_size,
        state_bytes=sizes.state_bytes,
        record_bytes=0,
        num_experts=0,
        activation_bytes=sizes.activation_bytes,
    )


def _policy(options: Options, facts: Facts, memory: Division, backend: str, reasons: list[str]) -> str:
    if options.moe_policy or backend not in ("offload", "hybrid"):
        return options.moe_policy or DEFAULT_POLICY
    cycles = (memory.num_slots - 1) / max(facts.experts_per_token, 1)
    if cycles < LRU_MIN_CYCLES:
        reasons.append(f"{cycles:.1f} token cycles of slots, where plain LRU would miss everything")
    return DEFAULT_POLICY


def resize_demand(plan: Plan, live_pages: int) -> Demand:
    """What a live resize must keep: the pages in use, the states, and slots as the backend needs them."""
    fixed = plan.backend in ("fused", "cpu") or plan.memory.num_slots <= 1
    return Demand(
        num_states=plan.memory.num_states,
        min_pages=max(live_pages, plan.min_pages),
        max_pages=plan.max_pages,
        num_slots=plan.memory.num_slots if fixed else None,
        min_slots=plan.min_slots,
    )

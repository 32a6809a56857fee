"""Contracts between rooms. A room offers one of these; `engine/build` alone picks which.

Everything here is abstract or a plain record; defaults stand in for `hasattr`. torch appears as a
type of data only.

    Device      memory, streams, clock and cost of a place to compute
    Pool        units of device memory that grow and shrink while serving
    WeightFormat, WeightSource       how weights are coded, where they are read from (core/weights)
    Model       a family's forward, layer by layer
    ExpertBackend, Policy            where routed experts are computed, what stays resident
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.core.batch import Batch
from freetoken.core.errors import ConfigError
from freetoken.core.expert_stats import ExpertStats
from freetoken.core.faults import Faults as Faults
from freetoken.core.machine import Machine
from freetoken.core.model_config import ModelConfig
from freetoken.core.weights import Biases as Biases
from freetoken.core.weights import CodedMatrix as CodedMatrix
from freetoken.core.weights import ExpertSink as ExpertSink
from freetoken.core.weights import WeightFormat as WeightFormat
from freetoken.core.weights import WeightSource as WeightSource


@dataclass(frozen=True)
class Numerics:
    """How numbers are computed and kept.

    exact     row-invariant float32 everywhere (slow; tests, research)
    kv_dtype  keys and values in pages, None = dtype; one byte: float8_e4m3fn, clamped to its range
    int8      the CPU multiplies weights in codes with activations rounded to int8, where a format has that
    """

    dtype: torch.dtype = torch.bfloat16
    exact: bool = False
    kv_dtype: torch.dtype | None = None
    int8: bool = False

    @property
    def kv(self) -> torch.dtype:
        return self.kv_dtype or self.dtype


@dataclass(frozen=True)
class Routing:
    """Routed experts of T rows. Dead rows carry ids of -1.

    ids      int32   [T, k]   expert within the layer, ascending within a row
    weights  float32 [T, k]   applied to the expert's output
    """

    ids: Tensor
    weights: Tensor


# --- devices --------------------------------------------------------------------------------


class Event(abc.ABC):
    """A point in a stream's order."""

    @abc.abstractmethod
    def done(self) -> bool:
        """True once everything before it has completed. Never blocks."""

    @abc.abstractmethod
    def time_s(self) -> float:
        """Completion time on the device's clock; waits for it."""


class Stream(abc.ABC):
    """An in-order queue of device work."""

    name: str

    @abc.abstractmethod
    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Enqueue a copy of equal-sized tensors. `dst` is undefined until a wait covers the copy."""

    def copy_all(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Enqueue copies (dst, src) in their order."""
        for dst, src in pairs:
            self.copy(dst, src)

    @abc.abstractmethod
    def record(self) -> Event: ...

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Make later work of this stream start after `event`."""

    def charge(self, num_bytes: float, flops: float) -> None:
        """Tell a simulated device what the work just enqueued here costs; real ones ignore it."""


class Clock(abc.ABC):
    """The device's own time: wall time on real devices, virtual on `sim`."""

    @abc.abstractmethod
    def now(self) -> float:
        """Seconds."""


class Pool(abc.ABC):
    """Equal units of device memory under a stable address range.

    Unit 0 is a dummy that no owner may use; it lies in the never-unmapped minimum.
    `generation` changes when views must be fetched anew.
    """

    name: str
    unit_bytes: int
    min_units: int
    max_units: int
    num_units: int
    generation: int

    @abc.abstractmethod
    def view(self) -> Tensor:
        """uint8 [num_units, unit_bytes], the mapped part only."""

    @abc.abstractmethod
    def resize(self, num_units: int) -> None:
        """Map or unmap the tail. The caller has moved live units out of it (`relocate`) and quiesced."""

    @abc.abstractmethod
    def relocate(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole units src[i] -> dst[i]; the sets are disjoint."""

    def used(self, units: np.ndarray, num_bytes: int) -> None:
        """Tell a simulated device that work just enqueued on `compute` reads these units' first bytes."""


class Device(abc.ABC):
    """A place to compute. `cpu` shares host memory; `sim` and `cuda` own memory behind a link.

    owns_memory     expert slots make sense: the device's memory is not the host's
    in_host_memory  what it holds is taken from the host's memory all the same
    run_ahead       launching a step before the last one is read pays
    kernels         has kernels that decide residency themselves; captures: decode steps are replayed
    compiles        compiles a kernel when it is first launched
    rehearsing      steps are run for the kernels that they would launch: nothing is copied over the link
    locks_memory    only copies to and from host memory that is locked (`pin`) leave the caller free meanwhile
    memory_bytes    what this process may take of it in all; beside_bytes: of it the driver's own, which no
                    pool can have
    slow_link       a slower link than there is, played for measuring: int64 [4] on the device, of
                    `core.machine.slow_link`; behind_copy(slow_link, bytes) follows each copy then
    """

    name: str
    torch_device: torch.device
    machine: Machine
    clock: Clock
    compute: Stream
    faults: Faults
    owns_memory: bool = True
    in_host_memory: bool = False
    run_ahead: bool = True
    kernels: bool = False
    captures: bool = False
    compiles: bool = False
    rehearsing: bool = False
    locks_memory: bool = False
    memory_bytes: int = 0
    beside_bytes: int = 0
    slow_link: Tensor | None = None
    behind_copy: Callable[[Tensor, int], None] | None = None

    @abc.abstractmethod
    def stream(self, name: str) -> Stream:
        """Return the named stream, made on first use."""

    @abc.abstractmethod
    def pool(self, name: str, unit_bytes: int, num_units: int, *, min_units: int, max_units: int) -> Pool:
        """Reserve address space for `max_units` and map `num_units`; CapacityError if it doesn't fit."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Memory that pools may still map."""

    def taken_bytes(self) -> int:
        """Memory that this process takes as the system sees it, 0 where nobody can be asked."""
        return 0

    def over_bytes(self) -> int:
        """How far `taken_bytes` lies above `memory_bytes`."""
        return max(0, self.taken_bytes() - self.memory_bytes)

    def charge(self, num_bytes: float, flops: float) -> None:
        """Tell a simulated device what the kernel just run on `compute` costs; real ones ignore it."""

    def enter(self) -> None:
        """The calling thread is going to use the device."""

    def pin(self, buffer: Tensor) -> int:
        """Lock host memory so that the device reads it; its address there, 0 if the system refuses."""
        return int(buffer.data_ptr())

    def unpin(self, buffer: Tensor) -> None:
        """Unlock what `pin` locked; no copy of it is at work."""

    def bucket(self, rows: int) -> int:
        """Rows a decode batch is padded to."""
        return rows

    def set_rates(self, **rates: float) -> None:
        """Change a simulated machine's rates from now on, as a throttle or a busy neighbour would."""
        raise ConfigError(
            f"The rates of device {self.name} are its own.",
            code="invalid_option",
            hint="Use --device sim to try other rates.",
        )

    @abc.abstractmethod
    def synchronize(self) -> None: ...

    def close(self) -> None:
        """Release threads and memory; idempotent."""


# --- state ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateSpec:
    """What one mixer kind keeps between steps, summed over its layers.

    unit         `page` (per page of tokens) or `state` (one per sequence)
    unit_bytes   bytes of one unit for all layers of the kind
    window       tokens that matter, None = all
    resume       `any` position, or `checkpoint` only
    page_sizes   allowed page sizes in tokens
    """

    kind: str
    unit: str
    unit_bytes: int
    window: int | None = None
    resume: str = "any"
    page_sizes: tuple[int, ...] = (16,)


# --- experts --------------------------------------------------------------------------------


Ids = NDArray[np.int64]


class Policy(abc.ABC):
    """Which experts stay resident: integers only, bit-exact with the device kernel of the same name.

    Expert ids are global: layer * num_experts + expert. All scores are ints.
    """

    name: str

    @abc.abstractmethod
    def reset(self, num_experts_total: int, num_slots: int, experts_per_token: int) -> None:
        """Start cold. experts_per_token = layers * top_k, one token cycle."""

    @abc.abstractmethod
    def touch(self, expert_ids: Sequence[int], step: int) -> None:
        """Note one layer's distinct routed experts (ascending), hits and misses alike."""

    @abc.abstractmethod
    def order_victims(
        self, resident: Sequence[int] | Ids, count: int, step: int, lacks: Sequence[int] | Ids | None = None
    ) -> list[int]:
        """Return up to `count` of the `resident` expert ids, coldest first; ties by lowest id.

        lacks   how much of each one's record is not there, in sixteenths; None: nothing
        """

    def order_fills(self, missing: Sequence[int], step: int) -> list[int]:
        """Order missing experts, most worth filling first. Default: as routed.

        Called after `touch` of the same layer-step. May leave out experts that are not worth a slot.
        """
        return list(missing)

    def seed(self, expert_ids: Sequence[int], counts: Sequence[int], step: int) -> None:
        """Note a prefill's routing: distinct experts and how many of its last tokens chose each.

        A prompt may come in several calls, layer by layer.
        """

    def place(self, count: int) -> list[int]:
        """Return up to `count` experts worth loading before decode starts, best first. Default: none."""
        return []


class ExpertBackend(abc.ABC):
    """Computes the routed experts of a layer: y = sum over routes of weight * expert(x).

    Routes are reduced in float32 in ascending expert id, whatever computed them (equality rule).
    `on_routing(layer, ids)` is called once a layer-step if set; ids int32 [T, k].
    """

    name: str
    stats: ExpertStats
    on_routing: Callable[[int, Tensor], None] | None = None

    @abc.abstractmethod
    def begin(self, layer: int, x: Tensor, routing: Routing, batch: Batch) -> None:
        """Start one MoE layer of a decode or riding-prefill batch. x [T, H] 16-bit (float32 if exact)."""

    @abc.abstractmethod
    def finish(self, layer: int) -> Tensor:
        """float32 [T, H]: the sum over routes; dead rows are zero."""

    def add(self, layer: int, h: Tensor) -> Tensor:
        """h [T, H] + the sum over routes, rounded once to h's type."""
        return h + self.finish(layer).to(h.dtype)

    @abc.abstractmethod
    def stream_layer(self, layer: int, x: Tensor, routing: Routing) -> Generator[None, None, Tensor]:
        """Compute a whole macro-chunk's layer, yielding where a decode step may be interposed.

        x [T, H] of all sub-chunks, routing of T rows. Returns float32 [T, H].
        """

    def look_ahead(self, layer: int, guess: Callable[[], Tensor]) -> None:
        """The layer after the one that has begun: `guess` tells int32 [T, k] of it, if it is worth asking."""

    def begin_job(self, num_tokens: int) -> None:
        """A layer-major prefill starts: set the ring up."""

    def end_job(self) -> None:
        """It ended or was dropped: give the ring back, promote what decode will want."""

    def absent_bytes(self, num_tokens: int) -> int:
        """Predicted bytes that a prefill of `num_tokens` would pull over the link, all layers."""
        return 0

    def begin_step(self) -> None:
        """A forward starts; may be captured with it."""

    def wake(self) -> None:
        """A step is about to be launched: whoever answers the device must be listening."""

    def rest(self) -> None:
        """No step is in flight any more, however it ended."""

    def end_step(self, step_s: float) -> None:
        """The oldest step that `wake` announced is complete: controllers and background fills advance."""

    def settle(self) -> None:
        """Bring `stats` up to date where a device keeps them; waits for it."""

    def freeze(self, frozen: bool) -> None:
        """Stop learning how to divide misses, or go on; for measuring what learning is worth."""

    def resize(self, num_slots: int) -> None:
        """Change residency at a safe point; backends without slots have nothing to do."""

    def close(self) -> None:
        """Release threads and device memory; idempotent."""


# --- models ---------------------------------------------------------------------------------


class Model(abc.ABC):
    """A family's forward. Layer-major prefill drives the same parts one by one.

    h [T, H] in the compute dtype; never allocates what outlives the call, never reads device values.
    """

    config: ModelConfig

    @abc.abstractmethod
    def embed(self, batch: Batch) -> Tensor: ...

    @abc.abstractmethod
    def mix(self, layer: int, h: Tensor, batch: Batch) -> Tensor:
        """Norm, mixer and residual of a layer. Writes KV pages and recurrent states."""

    @abc.abstractmethod
    def route(self, layer: int, h: Tensor, batch: Batch) -> tuple[Tensor, Routing]:
        """Return the normed x [T, H] and the routing of a MoE layer."""

    def guess(self, layer: int, h: Tensor, batch: Batch) -> Tensor:
        """Which experts a later layer would choose for this hidden state: int32 [T, k]."""
        return self.route(layer, h, batch)[1].ids

    @abc.abstractmethod
    def combine(self, layer: int, h: Tensor, x: Tensor, routed: Tensor) -> Tensor:
        """Add the shared expert last to `routed` float32 [T, H], round once, add the residual."""

    @abc.abstractmethod
    def dense(self, layer: int, h: Tensor) -> Tensor:
        """Norm, dense MLP and residual of a layer without experts."""

    @abc.abstractmethod
    def head(self, h: Tensor, rows: Tensor | None) -> Tensor:
        """float32 [R, V] logits of the given rows, or of all of them."""

    def forward(self, batch: Batch, experts: ExpertBackend) -> Tensor:
        """Run all layers of a batch: float32 [R, V] logits of `batch.logit_rows`."""
        experts.begin_step()
        return self.head(self.hidden(batch, experts), batch.logit_rows)

    def hidden(self, batch: Batch, experts: ExpertBackend) -> Tensor:
        """The hidden state [T, H] of a batch after all layers."""
        return self.mixed(self.embed(batch), batch, experts)

    def mixed(self, h: Tensor, batch: Batch, experts: ExpertBackend) -> Tensor:
        """The embedded tokens h [T, H] after all layers."""
        with_experts = self.config.moe_layers
        for layer, moe_layer in enumerate(self.config.moe_layer_of):
            h = self.mix(layer, h, batch)
            if moe_layer < 0:
                h = self.dense(layer, h)
                continue
            x, routing = self.route(layer, h, batch)
            experts.begin(moe_layer, x, routing, batch)
            if moe_layer + 1 < len(with_experts):
                guess = functools.partial(self.guess, with_experts[moe_layer + 1], h, batch)
                experts.look_ahead(moe_layer + 1, guess)
            h = self.add_experts(layer, h, x, experts)
        return h

    def add_experts(self, layer: int, h: Tensor, x: Tensor, experts: ExpertBackend) -> Tensor:
        """`combine` with what the experts that have begun on x answer."""
        return self.combine(layer, h, x, experts.finish(self.config.moe_layer_of[layer]))


class ModelFamily(abc.ABC):
    """One architecture: how its config reads, what tensors it has, how it is built.

    TINY   dict   a small config.json for tests; tile geometry with at least four tiles
    """

    model_types: tuple[str, ...]
    TINY: Mapping[str, Any]
    has_weights: bool = True

    @abc.abstractmethod
    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig: ...

    def place_windows(self, config: ModelConfig, wish: str) -> tuple[ModelConfig, str]:
        """Decide where windowed layers keep their keys and values (`auto`, `states`, `pages`), and say why.

        Returns the config with that decision and one line for the plan, empty if there are no windows.
        """
        return config, ""

    @abc.abstractmethod
    def state_specs(
        self, config: ModelConfig, page_size: int, dtype: torch.dtype
    ) -> tuple[StateSpec, ...]: ...

    @abc.abstractmethod
    def build(
        self,
        config: ModelConfig,
        source: WeightSource,
        device: Device,
        numerics: Numerics,
        pools: Mapping[str, Pool],
    ) -> Model:
        """Load dense weights, bind storage. pools: `kv` (pages), `state`. WeightsError lists all faults."""

    @abc.abstractmethod
    def load_experts(self, config: ModelConfig, source: WeightSource, put: ExpertSink) -> None:
        """Hand every expert's three matrices to `put`, layer by layer, in codes where it keeps the same."""

    def check(self, config: ModelConfig, source: WeightSource) -> None:
        """WeightsError that lists every missing, unknown or ill-shaped tensor, from headers alone."""

    def expert_tensors(self, config: ModelConfig, source: WeightSource) -> Sequence[tuple[str, ...]]:
        """Per MoE layer, the names of one expert's tensors: how they are coded, all of the layer's are."""
        return ()

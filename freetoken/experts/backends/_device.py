"""Residency on the device: every layer-step is decided, filled and computed by kernels, none by the host.

One class stands for all four backends on a device with kernels; they differ in who may take a miss:

    fused     every record has a slot        offload  the link alone
    hybrid    link and host by the split     cpu      the host alone: the device never sees the bank

Owns slots, table, the host's block and its poller. A step may be captured: nothing here reads the device,
but for `end_step`, which looks at counters once in a while. Rows beyond MOST_ROWS go through in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from freetoken.core.batch import Batch
from freetoken.core.errors import ConfigError, DeviceError
from freetoken.core.expert_stats import ExpertStats
from freetoken.core.interfaces import ExpertBackend, Routing
from freetoken.core.machine import GATHER_SHARE
from freetoken.experts.aside import Aside
from freetoken.experts.crew import Crew
from freetoken.experts.device_io import make_block
from freetoken.experts.device_stream import RING_SHARE, DeviceStream
from freetoken.experts.device_table import HOST_ONLY, SlotTable
from freetoken.experts.gpu_support import can_compute_here
from freetoken.experts.poller import Answers, Poller, can_compute, row_factor
from freetoken.experts.prefetch import Prefetch, tiles_of_idle_time
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.split import BUCKETS, balance
from freetoken.kernels import expert_step as step
from freetoken.kernels.expert_step import MOST_ROWS, VICTIMS, Call, Io

LEARN_EVERY = 16
COUNT_EVERY = 4
"""Steps between two looks at the device's counters; LEARN_EVERY is a multiple of it."""
WINDOW = 8
"""Steps of a window in which the host's rate is taken."""
ANSWER_S = 4e-6
"""What a question and its answer take on the link."""
LEARN = 0.25
ASK_AGAIN = 512
"""Steps after which a host that has become too slow to be asked is asked again."""
AHEAD_ROWS = 16
"""Batches of more rows visit most experts, so a guess tells nothing."""


class DeviceBackend(ExpertBackend):
    def __init__(self, setup: ExpertSetup, name: str) -> None:
        assert setup.config.moe is not None
        if not can_compute_here(setup.bank.formats, setup.config.moe):
            names = [fmt.name for fmt in setup.bank.formats]
            raise ConfigError(
                f"Experts like this model's ({', '.join(sorted(set(names)))}) are not computed on a GPU yet.",
                code="unsupported_on_gpu",
                hint="Use --device cpu, which computes every format.",
                param="device",
            )
        self.name, self.setup, self.bank, self.device = name, setup, setup.bank, setup.device
        self.stats = ExpertStats()
        self.top_k = setup.config.moe.top_k
        self.table = SlotTable(setup, everything=name == "fused", sees=name != "cpu")
        blind = sum(not place.address for place in self.table.places) if name != "fused" else 0
        self.io: Io | None = None
        self._poller: Poller | None = None
        self._crew: Crew | None = None
        if name == "hybrid" or blind:
            self._open_host()
        streams = self.device.name == "cuda"
        self._aside = Aside(torch.cuda.Stream(self.device.torch_device) if streams else None)
        self._partials: dict[int, Tensor] = {}
        self._call: Call | None = None
        self._parts: list[Tensor] = []
        self._stream = DeviceStream(setup, self.table, share=1 if name == "cpu" else RING_SHARE)
        self._steps = 0
        self._frozen = False
        self._told, self._unasked, self._learnt = Answers(), 0, False
        self._window = Answers()
        self._host = self._first_guess()
        self.table.set_splits(self._splits())
        self._prefetch = self._plan_prefetch()
        if name == "fused":
            self.table.load_everything()

    def _open_host(self) -> None:
        config = self.setup.config
        assert config.moe is not None
        if can_compute(self.setup):
            dtype = self.setup.numerics.dtype
            shape = (MOST_ROWS, self.top_k, config.hidden_size, config.moe.num_experts)
            self.io = make_block(self.device, *shape, dtype)
        if self.io is None:
            why = f"--moe-backend {self.name} needs the native library"
            if self.name == "offload":
                why = "The system locks no more memory for the GPU, so the CPU would have to help"
            raise ConfigError(
                f"{why}, which can't compute this model here.",
                code="no_host_executor",
                hint="Use --moe-backend offload with memory that may be locked (ulimit -l), "
                "or install FreeToken with a C++ compiler.",
                param="moe_backend",
            )
        self._poller = Poller(self.setup, self.io, MOST_ROWS, self.top_k)
        if self.name == "hybrid" and not self.setup.steady:
            self._crew = Crew(self._poller.threads, self._poller.limit)

    def _first_guess(self) -> tuple[float, float]:
        """What an answer of the host takes beside its tiles, and for each, in seconds."""
        machine, size = self.device.machine, max(one.tile_bytes for one in self.bank.layouts)
        return machine.cpu_fixed_s, size / machine.host_bw_beside_link

    def _splits(self) -> list[tuple[float, float]]:
        """(alpha, beta) of each batch bucket, by what is known of link and host."""
        if self.name != "hybrid":
            return [(1.0, 0.0)] * BUCKETS
        machine, size = self.device.machine, max(one.tile_bytes for one in self.bank.layouts)
        fixed, tile = self._host
        fill = (machine.fill_fixed_s, size / (GATHER_SHARE * machine.link_bw))
        return [
            balance(fill, (ANSWER_S + fixed, tile * row_factor(self._rows_of_an_expert(1 << bucket))))
            for bucket in range(BUCKETS)
        ]

    def _rows_of_an_expert(self, rows: int) -> float:
        """Mean over the experts that `rows` rows visit, if all were as likely."""
        chance = self.top_k / self.bank.num_experts
        return rows * chance / (1 - (1 - chance) ** rows) if chance < 1 else rows

    def _plan_prefetch(self) -> Prefetch | None:
        """The link's idle time goes to the next layer, where there is a link that misses use."""
        machine, size = self.device.machine, max(one.tile_bytes for one in self.bank.layouts)
        tiles = tiles_of_idle_time(GATHER_SHARE * machine.link_bw, size, VICTIMS)
        if self.setup.prefetch is not None:
            tiles = min(self.setup.prefetch, VICTIMS)
        if self.name not in ("offload", "hybrid") or not tiles:
            return None
        self.table.set_prefetch(tiles)
        return Prefetch(tiles)

    # --- one layer-step ---

    def begin_step(self) -> None:
        """A decode step's forward starts: age the policy's averages."""
        step.age(self.table.table)

    def wake(self) -> None:
        """A step is about to be launched: the host must be listening."""
        self._stream.interrupted()
        if self._poller is not None:
            self._poller.wake()

    def begin(self, layer: int, x: Tensor, routing: Routing, batch: Batch | None) -> None:
        if self.on_routing is not None:
            self.on_routing(layer, routing.ids.cpu())
        rows = x.shape[0]
        self._parts = []
        for at in range(0, max(rows - MOST_ROWS, 0), MOST_ROWS):
            cut = slice(at, at + MOST_ROWS)
            self._start(layer, x[cut], routing.ids[cut], routing.weights[cut])
            self._parts.append(self._end(layer))
        cut = slice(len(self._parts) * MOST_ROWS, rows)
        self._start(layer, x[cut], routing.ids[cut], routing.weights[cut])

    def add(self, layer: int, h: Tensor) -> Tensor:
        return super().add(layer, h) if self._parts else self._end(layer, h)

    def finish(self, layer: int) -> Tensor:
        parts, self._parts = [*self._parts, self._end(layer)], []
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _start(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        table, place = self.table.table, self.table.places[layer]
        bucket = max(0, x.shape[0] - 1).bit_length() if place.address else HOST_ONLY
        call = self._call = Call(x, ids, weights, self._scratch(x.shape[0]), self.io, bucket)
        self._aside.join()
        step.look_up(table, place, call)
        with self._aside.launch():
            step.prepare_victims(table)
        step.run_tiles(table, place, call)

    def look_ahead(self, layer: int, guess: Callable[[], Tensor]) -> None:
        """Bring what `layer` will probably miss, beside all that comes before its look-up."""
        call, table, place = self._call, self.table.table, self.table.places[layer]
        if self._prefetch is None or call is None or self._parts or call.x.shape[0] > AHEAD_ROWS:
            return
        if not place.address:
            return
        with self._aside.launch(after=False):
            soon = guess()
            step.look_ahead(table, place, call.ids, soon)
        # After run_tiles: until then the link is busy, and slots are read that may go.
        with self._aside.launch():
            step.fetch_ahead(table, place)
        self._aside.keep(call, guess, soon)

    def _end(self, layer: int, residual: Tensor | None = None) -> Tensor:
        call, self._call = self._call, None
        assert call is not None
        out = step.combine(self.table.table, self.table.places[layer], call, residual)
        if layer == self.bank.num_layers - 1:
            self._aside.join()
        return out

    def _scratch(self, rows: int) -> Tensor:
        """Partials of up to a power of two rows; kept, for a captured step names it."""
        rows = 1 << max(0, rows - 1).bit_length()
        if rows not in self._partials:
            place, layouts = self.device.torch_device.type, self.bank.layouts
            # Layers may be cut differently, by their formats; they share the place.
            runs = max(step.num_runs(place, one.num_tiles, one.tile_width) for one in layouts)
            shape = (rows * self.top_k, runs, layouts[0].hidden)
            self._partials[rows] = torch.empty(shape, device=self.device.torch_device)
        return self._partials[rows]

    # --- prefill, safe points ---

    def stream_layer(self, layer: int, x: Tensor, routing: Routing) -> Generator[None, None, Tensor]:
        if self.on_routing is not None:
            self.on_routing(layer, routing.ids.cpu())
        if not self._stream.is_open:
            self._stream.open()
        y = yield from self._stream.layer(layer, x, routing, self.setup.chunk_tokens)
        self.stats.prefill_link_bytes = self._stream.link_bytes
        return y

    def begin_job(self, num_tokens: int) -> None:
        self._stream.open()

    def end_job(self) -> None:
        self._stream.close()

    def absent_bytes(self, num_tokens: int) -> int:
        """All prompts of more rows than a step takes go layer by layer."""
        return self.bank.total_bytes if num_tokens > MOST_ROWS else 0

    def rest(self) -> None:
        if self._poller is not None:
            self._poller.rest(everything=True)

    def end_step(self, step_s: float) -> None:
        if self._poller is not None:
            self._poller.rest()
        self.stats.steps += 1
        self._steps += 1
        if self.io is not None and int(self.io.poison[0]):
            raise DeviceError(
                "The CPU did not answer the GPU within a second.",
                code="device_deadline",
                hint="Look for a process that takes the cores and restart, or use --moe-backend offload.",
            )
        if self._steps % COUNT_EVERY == 0:
            self.table.count(self.stats, wait=False)
        if self._steps % WINDOW == 0 and self._crew is not None and not self._frozen:
            self._size_crew(self._crew)
        if self._steps % LEARN_EVERY == 0:
            if self.name == "hybrid" and not self._frozen:
                self._learn()
            if self._prefetch is not None:
                made, right = self.stats.ahead_judged, self.stats.ahead_right
                self.table.set_prefetch(self._prefetch.budget(self._steps, made, right))

    def _size_crew(self, crew: Crew) -> None:
        assert self._poller is not None
        totals = self._poller.totals()
        answers, self._window = totals.since(self._window), totals
        if answers.tiles:
            crew.note(answers.tiles / answers.seconds)
            self.stats.extra["host_threads"] = crew.number

    def _learn(self) -> None:
        """Set the split anew from what the host's last answers took: a busy neighbour shifts it."""
        assert self._poller is not None
        totals = self._poller.totals()
        answers, self._told = totals.since(self._told), totals
        self._unasked = 0 if answers.requests else self._unasked + LEARN_EVERY
        if answers.tiles:
            weight, self._learnt = LEARN if self._learnt else 1.0, True
            (fixed, tile), (was_fixed, was) = answers.line(), self._host
            self._host = (was_fixed + weight * (fixed - was_fixed), was + weight * (tile - was))
        elif self._unasked >= ASK_AGAIN:  # what was slow then may be fast now: ask and learn
            self._unasked, self._learnt, self._host = 0, False, self._first_guess()
        self.table.set_splits(self._splits())

    def settle(self) -> None:
        self.table.count(self.stats)

    def freeze(self, frozen: bool) -> None:
        self._frozen = frozen

    def resize(self, num_slots: int) -> None:
        self._stream.resize(num_slots)

    def close(self) -> None:
        if self._poller is not None:
            self._poller.close()

"""The expert bank of a model and its filling, from whatever container the checkpoint is.

Owns the choice between reading records as they lie (FTW) and packing matrices, and the end of both: the
checkpoint is closed by whoever reads last. Knows no plan and no backend.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from freetoken.core import collector
from freetoken.core.errors import WeightsError
from freetoken.core.interfaces import Device, ModelFamily
from freetoken.core.model_config import ModelConfig
from freetoken.core.stopwatch import Stopwatch
from freetoken.core.weights import WeightFormat
from freetoken.engine.heat import Heat
from freetoken.experts import bank as expert_bank
from freetoken.experts.bank import ExpertBank
from freetoken.experts.loading import THREADS, Deferred, Job, Loading, hottest_first, record_jobs
from freetoken.experts.record import RecordLayout
from freetoken.native.topology import default_threads
from freetoken.quant import _reading as formats
from freetoken.weights.ftw_index import INDEX_NAME, Index
from freetoken.weights.load import Checkpoint

MOST_THREADS = 24


def make_bank(
    config: ModelConfig,
    layer_formats: Sequence[WeightFormat],
    records: Index | None,
    *,
    phantom: bool = False,
) -> ExpertBank:
    """The empty bank: laid out as the container's records are, or as we lay out what it has."""
    if records is None:
        return expert_bank.create(config, layer_formats, phantom=phantom)
    layouts = [RecordLayout(**one.layout) for one in records.layers]
    bank = ExpertBank(layouts, layer_formats, records.num_experts, phantom=phantom)
    _check_geometry(config, records, bank)
    return bank


def record_formats(records: Index) -> tuple[WeightFormat, ...]:
    """The weight format of each MoE layer's records."""
    return tuple(formats.find(one.format) for one in records.layers)


def _check_geometry(config: ModelConfig, records: Index, bank: ExpertBank) -> None:
    """The records must be those of this config, and laid out as this version computes."""
    assert config.moe is not None
    wrong = ""
    if (bank.num_layers, bank.num_experts) != (config.num_moe_layers, config.moe.num_experts):
        wrong = f"{bank.num_layers} x {bank.num_experts} experts"
    for layer, (one, fmt) in enumerate(zip(bank.layouts, bank.formats, strict=True)):
        if (one.hidden, one.expert_size) != (config.hidden_size, config.moe.expert_size):
            wrong = f"experts of {one.hidden} x {one.expert_size}"
        elif one.code_bytes != fmt.tile_bytes(one.tile_width, one.hidden) or one.record_bytes != (
            records.layers[layer].record_bytes
        ):
            wrong = f"{fmt.name} records of another layout in MoE layer {layer}"
    if wrong:
        raise WeightsError(
            f"{INDEX_NAME} describes {wrong}, which does not fit config.json and this version.",
            code="invalid_index",
            hint="Write the directory anew from the original checkpoint with ft checkpoint.",
        )


def _keep(memory: Tensor) -> int:
    return 0


class Filling:
    """A bank on its way to be full.

    heat   what earlier starts were asked for first is read first, and this one's is kept
    """

    def __init__(
        self,
        family: ModelFamily,
        config: ModelConfig,
        checkpoint: Checkpoint,
        bank: ExpertBank,
        device: Device,
        heat: Heat | None = None,
    ) -> None:
        self.bank, self._heat = bank, heat
        self._family, self._config, self._checkpoint = family, config, checkpoint
        self._device = device
        self._loading: Loading | None = None
        self._stopped = False
        self._readers, self._lock = 0, threading.Lock()
        self._watch = Stopwatch()
        self._began = 0.0

    @property
    def percent(self) -> int:
        return self._loading.percent if self._loading else 0

    @property
    def error(self) -> Exception | None:
        return self.bank.arrivals.error

    @property
    def fill_s(self) -> float:
        """Seconds from `start` to a full bank, layers pinned; 0 until it is."""
        return self._watch.seconds.get("fill", 0.0)

    @property
    def pin_s(self) -> float:
        """Seconds of threads that locked layers for the device while others still read."""
        return self._watch.seconds.get("pin", 0.0)

    def start(self, *, pins: bool = True) -> None:
        """Begin to fill; from here on reading a record waits for it.

        pins   lock complete layers for the device, which reads them; else it never sees them
        """
        self._began = time.perf_counter()
        with collector.paused():
            jobs = self._jobs()
        missing = set(self.bank.missing())
        for job in jobs:
            missing -= set(range(job.first, job.first + job.count))
        if missing:
            raise WeightsError(f"{len(missing)} experts are missing.", code="missing_experts")
        if self._heat is not None:
            jobs = hottest_first(jobs, self._heat.read())
        self.bank.fills = True
        self._open()
        self._loading = Loading(
            self.bank,
            jobs,
            self._checkpoint.files,
            pin=self._pin if pins else _keep,
            done=self._ended,
        )
        # Cutting takes cores; reading records as they lie takes none that a few threads wouldn't have.
        packs = self._checkpoint.records is None
        self._loading.start(max(THREADS, min(default_threads(), MOST_THREADS)) if packs else THREADS)

    def _jobs(self) -> list[Job]:
        checkpoint = self._checkpoint
        if checkpoint.records is not None:
            return record_jobs(self.bank, checkpoint.records, checkpoint.path, checkpoint.files)
        sink = Deferred(self.bank)
        self._family.load_experts(self._config, checkpoint.source, sink)
        return sink.jobs

    def wait(self, progress: Callable[[int], None] = lambda percent: None) -> None:
        """Until the bank is full; raises what went wrong."""
        if self._loading is not None:
            self._loading.wait(progress)

    @contextlib.contextmanager
    def kept_open(self) -> Generator[None]:
        """Whoever reads the checkpoint beside the experts: the last of them closes it, not the first."""
        self._open()
        try:
            yield
        finally:
            self._leave()

    def _open(self) -> None:
        with self._lock:
            self._readers += 1

    def _leave(self) -> None:
        with self._lock:
            self._readers -= 1
            last = not self._readers
        if last:
            self._checkpoint.close()

    def stop(self) -> None:
        """Give up what is not read yet. Idempotent."""
        self._stopped = True
        if self._loading is not None:
            self._loading.stop()
        self._checkpoint.close()

    def _pin(self, memory: Tensor) -> int:
        self._device.enter()
        with self._watch.part("pin"):
            return self._device.pin(memory)

    def _ended(self, error: Exception | None) -> None:
        self._watch.add("fill", time.perf_counter() - self._began)
        self._leave()
        if error is None and self._heat is not None and self.bank.arrivals.asked:
            self._heat.write(self.bank.arrivals.asked)
        if error is None and self._device.in_host_memory:
            threading.Thread(target=self._gather, name="freetoken-gather", daemon=True).start()

    def _gather(self) -> None:
        self.bank.gather(lambda: self._stopped)

"""A checkpoint written anew as FTW: records and dense tensors in their final form, streaming, on any machine.

Reads whatever the loader reads and packs with the loader's own sink; matrices may be coded anew on the way,
and what that costs is measured on every one. Memory is one expert for each thread, a piece of a tensor, and
the codes of a matrix.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freetoken import __version__
from freetoken.chat.gguf_vocabulary import files_of
from freetoken.core.errors import ConfigError
from freetoken.core.interfaces import ModelFamily
from freetoken.core.model_config import ModelConfig
from freetoken.core.weights import ExpertSink, WeightFormat
from freetoken.engine.dense_codes import DenseCodes, squares
from freetoken.engine.survey import expert_formats, find_family
from freetoken.experts import bank as expert_bank
from freetoken.experts.packing import RecordSink
from freetoken.experts.record import RecordLayout
from freetoken.quant import _reading as reading
from freetoken.weights import ftw_index
from freetoken.weights.files import Arena
from freetoken.weights.ftw_writer import FtwWriter, place, source_key
from freetoken.weights.load import Checkpoint, open_checkpoint
from freetoken.weights.read_ahead import natural

Progress = Callable[[str, int], None]
COPIED = (
    "*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.txt",
    "*.model",
    "*.md",
    "*.tiktoken",
    "LICENSE*",
)
NOT_COPIED = ("*.index.json", ftw_index.INDEX_NAME)


@dataclass(frozen=True)
class Wish:
    """experts, dense: the weight format of the experts and of the other matrices, empty: as they are.

    needs_experts   a wish for experts is an error where a model has none
    """

    model: Path
    out: Path
    experts: str = ""
    dense: str = ""
    shard_bytes: int = ftw_index.SHARD_BYTES
    threads: int = 4
    needs_experts: bool = True


@dataclass(frozen=True)
class Written:
    """The outcome. errors is empty unless something was coded anew, resumed counts an earlier run's pieces.

    left_out   dense matrices that were to be coded and whose shape the format can't have
    """

    out: Path
    num_bytes: int
    num_tensors: int
    num_records: int
    formats: tuple[str, ...]
    resumed: int
    errors: list[tuple[str, float, float]]
    left_out: list[str]


def convert(wish: Wish, progress: Progress = lambda phase, percent: None) -> Written:
    """Write `wish.out`; WeightsError, ConfigError or CapacityError leave what is written for the next run."""
    checkpoint = open_checkpoint(wish.model)
    try:
        return _Conversion(wish, checkpoint, progress).run()
    finally:
        checkpoint.close()


class _Conversion:
    def __init__(self, wish: Wish, checkpoint: Checkpoint, progress: Progress) -> None:
        if checkpoint.records is not None:
            raise ConfigError(
                f"{wish.model} is an FTW directory already.",
                code="usage",
                hint="Copy it, or name the original checkpoint with --model.",
            )
        self.wish, self.checkpoint, self.progress = wish, checkpoint, progress
        self.family: ModelFamily = find_family(checkpoint.model_type)
        self.config: ModelConfig = self.family.read_config(checkpoint.config)
        self.family.check(self.config, checkpoint.source)
        self.formats = self._formats()
        dense = reading.find(wish.dense) if wish.dense else None
        self.dense = DenseCodes(checkpoint.source, self.config, dense)

    def _formats(self) -> tuple[WeightFormat, ...]:
        stored = expert_formats(self.family, self.config, self.checkpoint)
        if not self.wish.experts:
            return stored
        if not stored and self.wish.needs_experts:
            raise ConfigError(
                "--experts: this model has no routed experts.", code="no_experts", hint="See --dense."
            )
        return (reading.find(self.wish.experts),) * len(stored)

    def run(self) -> Written:
        moe = self.config.moe if self.formats else None
        layouts = expert_bank.create(self.config, self.formats, phantom=True).layouts if moe else ()
        names = sorted((n for n in self.checkpoint.source.names() if ".experts." not in n), key=natural)
        forms = [(name, self.dense.form(name)) for name in names]
        plan = place(
            [(name, form.dtype, self.checkpoint.source.shape(name), form.num_bytes) for name, form in forms],
            [(f.name, asdict(one), one.record_bytes) for f, one in zip(self.formats, layouts, strict=True)],
            moe.num_experts if moe else 0,
            self.wish.shard_bytes,
        )
        wishes = {"experts": self.wish.experts, "dense": self.wish.dense, "version": __version__}
        writer = FtwWriter(self.wish.out, plan, source_key(self._inputs(), wishes))
        try:
            if writer.resumed:
                writer.check_resumed(lambda n, of: self._tell("checking", n, of), self.wish.threads)
            resumed = len(writer.done)
            sink = _FtwSink(self, layouts, writer)
            self._fill(writer, names, sink)
            origin = {"writer": f"freetoken {__version__}", "model": self.checkpoint.path.name}
            index = writer.finish(self._extra(), origin)
        except BaseException:
            writer.abandon()
            raise
        return Written(
            out=self.wish.out,
            num_bytes=sum(shard.num_bytes for shard in index.shards),
            num_tensors=len(names),
            num_records=len(self.formats) * index.num_experts,
            formats=tuple(dict.fromkeys(f.name for f in self.formats)),
            resumed=resumed,
            errors=self.dense.errors.rows(),
            left_out=self.dense.left_out(names),
        )

    def _inputs(self) -> list[Path]:
        path = self.checkpoint.path
        return [p for p in path.iterdir() if p.is_file()] if path.is_dir() else [path]

    def _extra(self) -> dict[str, bytes]:
        """The small files that make the directory complete."""
        path = self.checkpoint.path
        if self.checkpoint.metadata:
            text = files_of(self.checkpoint.metadata)
            generation = json.loads(text["generation_config.json"]) | dict(self.checkpoint.generation)
            return {
                **text,
                "config.json": _json(self.checkpoint.config),
                "generation_config.json": _json(generation),
            }
        left_out = {p for pattern in NOT_COPIED for p in path.glob(pattern)}
        found = {p for pattern in COPIED for p in path.glob(pattern) if p.is_file()}
        return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(found - left_out)}

    def _tell(self, phase: str, done: int, total: int) -> None:
        self.progress(phase, 100 * done // max(total, 1))

    def _fill(self, writer: FtwWriter, names: list[str], sink: _FtwSink) -> None:
        """Write everything that isn't there yet, tensors first."""
        if self.formats:
            self.family.load_experts(self.config, self.checkpoint.source, sink)
        todo = [name for name in names if f"tensor {name}" not in writer.done]
        total = len(names) + len(self.formats) * writer.plan.num_experts
        tensors = [partial(self._write_tensor, writer, name) for name in todo]
        jobs: Iterator[Callable[[Arena], None]] = iter([*tensors, *sink.jobs])
        arenas = threading.local()

        def work(job: Callable[[Arena], None]) -> None:
            arena = arenas.__dict__.setdefault("arena", Arena())
            with self.checkpoint.files.reading(arena):
                job(arena)
            arena.reset()

        with ThreadPoolExecutor(self.wish.threads, "freetoken-convert") as pool:
            for _ in _finished(pool, work, jobs, 2 * self.wish.threads):
                self._tell("writing", len(writer.done), total)

    def _write_tensor(self, writer: FtwWriter, name: str, arena: Arena) -> None:
        writer.put(name, self.dense.parts(name, arena))


class _FtwSink(RecordSink):
    """Packs experts in threads and hands the records to the writer; those it has already are left out."""

    def __init__(self, conversion: _Conversion, layouts: Iterable[RecordLayout], writer: FtwWriter) -> None:
        super().__init__(tuple(layouts), conversion.formats, writer.plan.num_experts)
        self.jobs: list[Callable[[Arena], None]] = []
        self._errors = conversion.dense.errors if conversion.wish.experts else None
        self._writer = writer

    def defer(self, layer: int, expert: int, fill: Callable[[ExpertSink], None]) -> None:
        if ftw_index.record_name(layer, expert) not in self._writer.done:
            self.jobs.append(lambda arena: fill(self))

    def place(self, layer: int, expert: int) -> Tensor:
        return torch.zeros(self.layouts[layer].record_bytes, dtype=torch.uint8)

    def finish(self, layer: int, expert: int, record: Tensor) -> None:
        self._writer.put_record(layer, expert, record)

    def compare(self, layer: int, record: Tensor, numbers: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._errors is None:
            return
        one, (gate, up, down) = self.layouts[layer], numbers
        tiles = one.tiles(record)[:, : one.code_bytes]
        made = self.formats[layer].tile_weights(tiles, one.tile_width, one.hidden)
        for name, wanted, got in zip(("gate", "up", "down"), (gate, up, down.t()), made, strict=True):
            self._errors.note(f"expert {name}", *squares(wanted, got.flatten(0, 1)))


def _finished(
    pool: ThreadPoolExecutor,
    work: Callable[[Callable[[Arena], None]], None],
    jobs: Iterator[Callable[[Arena], None]],
    ahead: int,
) -> Iterator[None]:
    """Run jobs with at most `ahead` of them handed out; yields as each one ends, raises the first error."""
    running: set[Future[None]] = set()
    for job in jobs:
        running.add(pool.submit(work, job))
        if len(running) < ahead:
            continue
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for one in done:
            one.result()
            yield
    for one in running:
        one.result()
        yield


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(value), indent=1, default=list).encode()

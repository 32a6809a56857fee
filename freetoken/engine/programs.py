"""Decode steps of the CPU as recorded programs, one for each number of rows: what graphs are on a GPU.

A step's forward touches fixed addresses only. While one runs, the native library writes its jobs down; if
they were all that happened, later steps of as many rows play the list in one call, without Python between
the operations. Anything else that computes is seen, and the model goes on as before. Owns programs and the
memory between their operations. Invariant: a played step has the bits of the step that was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from freetoken.core.batch import Batch, BatchBuffers, Segment
from freetoken.core.interfaces import Device, ExpertBackend, Model
from freetoken.core.log import logger
from freetoken.native.library import library
from freetoken.native.program import Program, Tape

log = logger("programs")
MOST_ROWS = 4
"""Steps of more rows have more to compute, and each program holds its rows' intermediate numbers."""
_ALLOCATE = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}


class _Watcher(TorchDispatchMode):  # type: ignore[misc]
    """Keeps what is allocated and refuses whatever else torch computes; views are nothing."""

    def __init__(self, tape: Tape, kept: list[Tensor]) -> None:
        super().__init__()
        self._tape, self._kept = tape, kept

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would load its compiler to keep it away from here: seconds, at somebody's first request."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in _pytree.tree_leaves(out) if isinstance(t, Tensor)]
        if func._schema.name in _ALLOCATE:
            self._kept += made
        elif not (func.is_view and self._shares(made, (args, kwargs))):
            self._tape.refuse(str(func))
        return out

    @staticmethod
    def _shares(made: Sequence[Tensor], given: Any) -> bool:
        """Whether no tensor was made but views of the given ones: `reshape` and `to` may copy."""
        storages = {
            t.untyped_storage().data_ptr() for t in _pytree.tree_leaves(given) if isinstance(t, Tensor)
        }
        return all(t.untyped_storage().data_ptr() in storages for t in made)


@dataclass(frozen=True)
class _Recorded:
    """h [rows, H] goes in, logits float32 [rows, V] come out; `kept` holds what lies between."""

    program: Program
    h: Tensor
    logits: Tensor
    kept: list[Tensor] = field(repr=False)


class DecodePrograms:
    """`launch` runs a decode step of up to `MOST_ROWS` sequences."""

    def __init__(self, model: Model, experts: ExpertBackend, buffers: BatchBuffers) -> None:
        self._model, self._experts, self._buffers = model, experts, buffers
        self._recorded: dict[int, _Recorded] = {}
        self.refusal = ""

    def fits(self, segments: Sequence[Segment]) -> bool:
        """Whether a step is one token of each sequence and nothing else, and such steps can be recorded."""
        return (
            not self.refusal
            and 0 < len(segments) <= MOST_ROWS
            and self._experts.on_routing is None
            and all(len(s.token_ids) == 1 and s.wants_logits and not s.saves for s in segments)
        )

    def launch(self, segments: Sequence[Segment]) -> tuple[Batch, Tensor]:
        """Run the step: its batch and float32 [B, V] logits, which live until the next launch."""
        lib, rows = library(), len(segments)
        assert lib is not None
        batch = self._buffers.fill(segments, rows)
        self._experts.wake()
        self._experts.begin_step()
        h, found = self._model.embed(batch), self._recorded.get(rows)
        if found is None:
            return batch, self._record(h, batch)
        found.h.copy_(h)
        lib.play(found.program)
        found.program.finish()
        return batch, found.logits

    def program(self, rows: int) -> Program | None:
        """The program of steps of `rows` sequences, if one has run."""
        found = self._recorded.get(rows)
        return found.program if found else None

    def _record(self, h: Tensor, batch: Batch) -> Tensor:
        """Run the step and keep it if it can be played."""
        lib, tape, kept = library(), Tape(), [h]
        assert lib is not None
        with lib.recording(tape), _Watcher(tape, kept):
            logits = self._model.head(self._model.mixed(h, batch, self._experts), None)
        if not tape.jobs:
            tape.refuse("a model without native operations")
        if not tape.refusal:
            self._recorded[len(h)] = _Recorded(Program(tape), h, logits, kept)
        elif tape.final:
            self.refusal = tape.refusal
            log.debug("decode steps can't be recorded: %s", tape.refusal)
        return logits


def supported(device: Device) -> bool:
    """Whether forwards on the device are calls of the native library on host memory."""
    return library() is not None and device.in_host_memory and not (device.owns_memory or device.kernels)

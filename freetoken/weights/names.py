"""One spelling of tensor names, whatever wrapper class wrote the checkpoint.

Canonical: `model.<...>` for the decoder and `lm_head.weight`. Prefixes of multimodal wrappers are
mapped; parts that a text model doesn't use (vision tower, multi-token prediction) are skipped and
listed. Names that fit nothing stay as they are: the family's check will report them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.weights import CodedMatrix, Fetched, Stored, WeightSource

_PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("language_model.", "model."),
    ("model.text_model.", "model."),
)
_USUAL, _FREQUENCIES = "model.layers.", ".rotary_emb.inv_freq"
_BARE = re.compile(r"^(embed_tokens|layers|norm)\.")
_SKIPPED = re.compile(
    r"^(model\.)?(mtp|visual|vision_tower|vision_model|multi_modal_projector)\.|\.rotary_emb\.inv_freq$"
)


def canonical(name: str) -> str | None:
    """Return the canonical name, or None for a tensor that is skipped."""
    if name.startswith(_USUAL) and not name.endswith(_FREQUENCIES):  # nearly all of a large checkpoint
        return name
    if _SKIPPED.search(name):
        return None
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            name = replacement + name[len(prefix) :]
            break
    if _SKIPPED.search(name):
        return None
    return "model." + name if _BARE.match(name) else name


class CanonicalSource(WeightSource):
    """A source under canonical names. `skipped` lists the stored names left out."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.holds_records = source.holds_records
        self._stored: dict[str, str] = {}
        self.skipped: list[str] = []
        for stored in source.names():
            name = canonical(stored)
            if name is None:
                self.skipped.append(stored)
            elif name in self._stored:
                raise WeightsError(
                    f"Tensors {self._stored[name]} and {stored} are the same part of the model.",
                    code="duplicate_tensor",
                    hint="Remove the file that doesn't belong to this checkpoint.",
                )
            else:
                self._stored[name] = stored

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored.get(name, name))

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._stored.get(name, name))

    def read(self, name: str) -> Tensor:
        return self._source.read(self._stored.get(name, name))

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._source.read_rows(self._stored.get(name, name), start, stop)

    def coding(self, name: str) -> str:
        return self._source.coding(self._stored.get(name, name))

    def read_coded(self, name: str, index: int | None = None) -> CodedMatrix:
        return self._source.read_coded(self._stored.get(name, name), index)

    def stored(self, name: str, index: int | None = None) -> tuple[Stored, ...]:
        return self._source.stored(self._stored.get(name, name), index)

    def fetch(self, some: Sequence[Stored]) -> Fetched | None:
        return self._source.fetch(some)

    def packs(self, name: str) -> bool:
        return self._source.packs(self._stored.get(name, name))

    def columns(self, name: str) -> Tensor | None:
        return self._source.columns(self._stored.get(name, name))

    def stored_bytes(self, name: str) -> int:
        return self._source.stored_bytes(self._stored.get(name, name))

    def close(self) -> None:
        self._source.close()


def check_tensors(
    source: WeightSource, expected: Mapping[str, tuple[int, ...]], optional: Iterable[str] = ()
) -> None:
    """Compare what a model needs with what is there; one WeightsError lists every fault.

    expected   name -> shape; experts are left out where the source has them as records
    optional   names that may be there and are not used
    """
    if source.holds_records:
        expected = {name: shape for name, shape in expected.items() if ".experts." not in name}
    present = set(source.names())
    missing = sorted(set(expected) - present)
    unknown = sorted(present - set(expected) - set(optional))
    wrong = [
        f"{name} has shape {list(source.shape(name))}, expected {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in present and source.shape(name) != shape
    ]
    if not (missing or unknown or wrong):
        _check_numbers(source, expected)
        return
    parts = [("missing", missing), ("unknown", unknown), ("of wrong shape", wrong)]
    text = ". ".join(f"{len(names)} tensors {what}: {', '.join(names)}" for what, names in parts if names)
    message = f"The checkpoint doesn't fit its config.json. {text}."
    hint = "Check that config.json and the weights belong to the same model."
    if missing:
        raise WeightsError(message, code="missing_tensor", hint=hint)
    if unknown:
        raise WeightsError(message, code="unknown_tensor", hint=hint)
    raise WeightsError(message, code="invalid_tensor_shape", hint=hint)


def _check_numbers(source: WeightSource, names: Iterable[str]) -> None:
    """Plain integers are codes whose scale nobody knows. Experts' formats see to their own."""
    present = set(source.names())
    plain = [n for n in names if n in present and ".experts." not in n and not source.coding(n)]
    dtypes = {name: source.dtype(name) for name in plain}
    coded = [f"{name} ({dtype})" for name, dtype in dtypes.items() if not dtype.is_floating_point]
    if coded:
        raise WeightsError(
            f"{len(coded)} tensors hold integers, and nothing says what they mean: {', '.join(coded)}.",
            code="unknown_weight_format",
            hint="Take the checkpoint in 16 bits, or one whose config.json names its quantisation.",
        )

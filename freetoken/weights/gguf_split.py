"""A model's GGUF files as one: a single file, or the shards `name-00001-of-00003.gguf`.

Any shard may be named. Metadata is the first shard's. Invariant: all shards are there, each says the
number that its name says, and together they hold the promised tensors, each once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.weights.files import Files
from freetoken.weights.gguf import GgufFile, GgufTensor

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


class GgufModel:
    """All tensors of a model by name, wherever they lie.

    name       what the files have in common
    files      where all bytes come from
    metadata   the header's keys and values
    tensors    stored name -> entry
    """

    def __init__(self, path: Path, files: Files | None = None) -> None:
        paths = shards_of(path)
        self.path = paths[0]
        match = _SHARD.match(path.name)
        self.name = match["stem"] if match else path.stem
        self.files = files or Files()
        opened = [GgufFile(p, self.files) for p in paths]
        self.metadata: Mapping[str, Any] = opened[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        self._file_of: dict[str, GgufFile] = {}
        for number, file in enumerate(opened):
            _check_number(file, number, len(opened))
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    raise WeightsError(
                        f"Tensor {name} is in both {self._file_of[name].path.name} and {file.path.name}.",
                        code="duplicate_tensor",
                        hint="A file doesn't belong to this model; fetch the shards again.",
                    )
                self.tensors[name], self._file_of[name] = tensor, file
        promised = self.metadata.get("split.tensors.count", len(self.tensors))
        if promised != len(self.tensors):
            raise WeightsError(
                f"The {len(opened)} files of {self.name} hold {len(self.tensors)} tensors, "
                f"the first one promises {promised}.",
                code="missing_shard",
                hint="Fetch the shards again, all from one place.",
            )

    def rows(self, tensor: GgufTensor, start: int, stop: int) -> Tensor:
        """uint8 [stop - start, row_bytes] of a tensor's rows, a view of the file."""
        return self._file_of[tensor.name].rows(tensor, start, stop)


def shards_of(path: Path) -> list[Path]:
    """The files of the model that `path` belongs to, in order. WeightsError `missing_shard`."""
    match = _SHARD.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{i:05}-of-{match['count']}.gguf" for i in range(1, min(count, 10000) + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing or not names:
        raise WeightsError(
            f"{path.name} is one of {count} files; missing: {', '.join(missing[:20]) or 'all'}.",
            code="missing_shard",
            hint=f"Copy or download them into {path.parent}.",
        )
    return [path.parent / name for name in names]


def models_in(directory: Path) -> list[Path]:
    """The first file of each text model in a folder; projectors of images lie beside theirs."""
    found = []
    for path in sorted(directory.glob("*.gguf")):
        match = _SHARD.match(path.name)
        if not path.name.startswith("mmproj") and (match is None or int(match["number"]) == 1):
            found.append(path)
    return found


def _check_number(file: GgufFile, number: int, count: int) -> None:
    says = file.metadata.get("split.no", 0), file.metadata.get("split.count", 0) or 1
    if says[1] == count and (count == 1 or says[0] == number):
        return
    raise WeightsError(
        f"{file.path.name} says that it is file {says[0] + 1} of {says[1]}; by its name it is "
        f"{number + 1} of {count}.",
        code="invalid_shard",
        hint="Give the files the names they were published under, or fetch them again.",
    )

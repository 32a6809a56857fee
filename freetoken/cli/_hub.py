"""The hub of models, as `ft pull` and `ft plan` need it: what a model consists of, headers, downloads.

The one file that imports the hub's client, and only when it is used. Every way in which a network can
fail becomes an error of ours with the next step. Nothing here runs while a model is served.
"""

from __future__ import annotations

import fnmatch
import json
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.core import env
from freetoken.core.errors import ConfigError, FreeTokenError, NotFoundError, WeightsError
from freetoken.core.units import format_bytes

SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
FACTS = ("config.json", "generation_config.json", "*quant*.json", "*.index.json")
WEIGHTS = ("*.safetensors",)
GGUF = ("*.gguf",)
_UNWANTED = ("original/*", "onnx/*", "*/onnx/*", "training_args*")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PROJECTOR = ("mmproj*", "*/mmproj*")
_FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 28
"""Of a GGUF file's header, asked for at first and at most; a large vocabulary makes it 5 to 10 MiB."""


@dataclass(frozen=True)
class File:
    path: str
    num_bytes: int


def files(name: str, revision: str | None = None) -> list[File]:
    """A model's files with their sizes, those that nobody here reads left out."""
    with _talking(name):
        info = _client().HfApi().model_info(name, revision=revision, files_metadata=True, timeout=15)
    found = [File(one.rfilename, int(one.size or 0)) for one in info.siblings or []]
    return [file for file in found if not matches(file.path, _UNWANTED)]


def matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def download(name: str, paths: Sequence[str], revision: str | None, *, bars: bool) -> Path:
    """Fetch files into the shared cache; what is there already is not fetched again. Returns the snapshot."""
    hub = _client()
    if not bars:
        hub.utils.disable_progress_bars()
    with _talking(name):
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(paths)))


def choose(name: str, found: list[File], pattern: str | None) -> list[File]:
    """The weight files to take: those that the pattern names, else safetensors, else the only GGUF model."""
    weights = [file for file in found if matches(file.path, (*WEIGHTS, *GGUF))]
    ggufs = [file for file in weights if matches(file.path, GGUF) and not matches(file.path, _PROJECTOR)]
    if pattern:
        chosen = [file for file in weights if matches(file.path, (pattern, f"*/{pattern}"))]
    else:
        chosen = [file for file in weights if matches(file.path, WEIGHTS) and "/" not in file.path]
        chosen = chosen or (ggufs if _count_models(ggufs) == 1 else [])
    if not weights:
        raise ConfigError(
            f"{name} has no weights in safetensors or GGUF.",
            code="no_weights",
            hint="Look for another copy of this model.",
        )
    if not chosen:
        shown = ", ".join(f"{file.path} ({format_bytes(file.num_bytes)})" for file in weights[:12])
        raise ConfigError(
            f"{name} has these weights: {shown}.", code="choose_file", hint="Choose with --file PATTERN."
        )
    return chosen


def _count_models(ggufs: Sequence[File]) -> int:
    """Shards of one model count once."""
    return len({_SHARD.sub("", file.path) for file in ggufs})


def fetch_headers(name: str, to: Path, pattern: str | None = None) -> None:
    """Make a folder with a model's weight files as headers over empty space, and its config.

    Each weight file has its real length and takes no room where the file system knows holes.
    """
    hub = _client()
    found = files(name)
    chosen = choose(name, found, pattern)
    ggufs = [file for file in chosen if matches(file.path, GGUF)]
    if ggufs and (len(ggufs) < len(chosen) or _count_models(ggufs) > 1):
        raise ConfigError(
            f"{name}: {pattern} names several models: {', '.join(file.path for file in chosen[:12])}.",
            code="choose_file",
            hint="Choose one with --file PATTERN.",
        )
    with _talking(name):
        if ggufs:
            for file in ggufs:
                _fetch_gguf(hub, name, file, to / Path(file.path).name)
            return
        for file in found:
            if matches(file.path, FACTS) and "/" not in file.path:
                hub.hf_hub_download(name, file.path, local_dir=to)
        for file in chosen:
            parsed = hub.HfApi().parse_safetensors_file_metadata(name, file.path)
            _write_header(to / Path(file.path).name, parsed.tensors)


def _fetch_gguf(hub: Any, name: str, file: File, path: Path) -> None:
    """The beginning of a file, as much of it as its header takes: how much that is only reading it tells."""
    from freetoken.weights.gguf import GgufFile

    url = hub.hf_hub_url(name, file.path)
    wanted = _FIRST_BYTES
    with path.open("w+b") as out:
        while True:
            start, stop = out.tell(), min(wanted, file.num_bytes)
            out.write(_range(hub, url, start, stop))
            out.flush()
            try:
                GgufFile(path, num_bytes=file.num_bytes)
                break
            except WeightsError as error:
                is_short = error.code == "truncated_shard" and stop < min(file.num_bytes, _MOST_BYTES)
                if not is_short:
                    raise
            wanted *= 4
        out.truncate(file.num_bytes)


def _range(hub: Any, url: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file of the hub."""
    asked = {**hub.utils.build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
    response = hub.utils.get_session().get(url, headers=asked, timeout=30)
    hub.utils.hf_raise_for_status(response)
    body: bytes = response.content
    if response.status_code == 200:  # a server that knows no ranges sends all of it
        body = body[start:stop]
    if len(body) != stop - start:
        raise OSError(f"{len(body)} bytes of {url} came, {stop - start} were asked for")
    return body


def _write_header(path: Path, tensors: Any) -> None:
    entries = {
        name: {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": list(one.data_offsets)}
        for name, one in tensors.items()
    }
    text = json.dumps(entries).encode()
    end = max((one["data_offsets"][1] for one in entries.values()), default=0)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)


def _client() -> Any:
    if env.hub_offline():
        raise FreeTokenError(
            "The hub is not asked: HF_HUB_OFFLINE is set.",
            code="hub_offline",
            hint="Unset it, or name a folder or a model that `ft models` lists.",
        )
    import huggingface_hub
    import huggingface_hub.utils

    return huggingface_hub


@contextmanager
def _talking(name: str) -> Iterator[None]:
    """Turn the client's errors into ours."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise NotFoundError(
            f"{name} is only given to those who have accepted its terms.",
            code="model_gated",
            hint="Accept them on the model's page, then run `hf auth login` and this again.",
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise NotFoundError(
            f"The hub has no model {name}, or keeps it private.",
            code="model_not_found",
            hint="Check the spelling; for private models run `hf auth login` first.",
        ) from error
    except (errors.SafetensorsParsingError, errors.EntryNotFoundError) as error:
        raise FreeTokenError(f"{name} can't be read: {error}.", code="hub_unreachable") from error
    except (OSError, TimeoutError) as error:
        raise _unreachable(error) from error
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "huggingface_hub")):
            raise
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> FreeTokenError:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return FreeTokenError(
        f"The hub can't be reached: {text}",
        code="hub_unreachable",
        hint="Check the network and try again: what has arrived is kept. `ft models` lists what is here.",
    )

"""The hub of models, as `ft pull` and `ft plan` need it: what a model consists of, headers, downloads.

The one file that imports the hub's client, and only when it is used. Every way in which a network can
fail becomes an error of ours with the next step. Nothing here runs while a model is served.
"""

from __future__ import annotations

import fnmatch
import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.core import env
from freetoken.core.errors import FreeTokenError, NotFoundError

SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
FACTS = ("config.json", "generation_config.json", "*quant*.json", "*.index.json")
WEIGHTS = ("*.safetensors",)
GGUF = ("*.gguf",)
_UNWANTED = ("original/*", "onnx/*", "*/onnx/*", "training_args*")


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


def fetch_headers(name: str, to: Path, revision: str | None = None) -> None:
    """Make a folder with a model's config, and its weight files as headers over empty space.

    Each weight file has its real length and takes no room where the file system knows holes.
    """
    hub = _client()
    found = files(name, revision)
    if not any(matches(file.path, WEIGHTS) for file in found):
        raise NotFoundError(
            f"{name} has no safetensors, whose headers could be asked for.",
            code="no_weights",
            hint=f"Fetch it first: ft pull {name}",
        )
    with _talking(name):
        for file in found:
            if matches(file.path, FACTS) and "/" not in file.path:
                hub.hf_hub_download(name, file.path, revision=revision, local_dir=to)
        for file in found:
            if matches(file.path, WEIGHTS) and "/" not in file.path:
                parsed = hub.HfApi().parse_safetensors_file_metadata(name, file.path, revision=revision)
                _write_header(to / file.path, parsed.tensors)


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

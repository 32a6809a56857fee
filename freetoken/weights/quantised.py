"""Which dialect a checkpoint is written in: by `quant_method` in config.json or in a file beside it.

Owns the places where tools leave that word. A checkpoint that says nothing is plain; a method that no
dialect claims is refused by name before a tensor is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freetoken.core import choices
from freetoken.core.errors import WeightsError
from freetoken.core.log import logger
from freetoken.core.weights import WeightSource
from freetoken.weights.dialect import Dialect, DialectSource

_log = logger("weights")
_KEYS = ("quantization_config", "compression_config")
# Written beside config.json by some tools, and the method each one stands for if it doesn't say.
_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantization_config.json": "",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
_DIALECTS = "freetoken.weights.dialects"


def with_plain_names(directory: Path, config: Mapping[str, Any], source: WeightSource) -> WeightSource:
    """The source as it is, or with coded modules as matrices under their plain names."""
    raw, where = _settings(directory, config)
    if raw is None:
        return source
    method = str(raw.get("quant_method", ""))
    dialect = _find(method, where)
    found = DialectSource(source, dialect, raw)
    counts = found.counts()
    _log.info("%s: %s", method, ", ".join(f"{n} matrices of {name}" for name, n in sorted(counts.items())))
    return found


def _settings(directory: Path, config: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """The quantisation's own config and where it was found."""
    text = config.get("text_config")
    for one in (config, text if isinstance(text, Mapping) else {}):
        for key in _KEYS:
            if isinstance(one.get(key), Mapping):
                return one[key], f"config.json, {key}"
    for name, method in _FILES.items():
        if (directory / name).is_file():
            raw = _read(directory / name)
            # ModelOpt nests its facts in `quantization`.
            inner = raw.get("quantization")
            flat = {**raw, **inner} if isinstance(inner, Mapping) else raw
            return {"quant_method": method, **flat}, name
    return None, ""


def _find(method: str, where: str) -> Dialect:
    known: dict[str, Dialect] = {}
    for name in choices.names(_DIALECTS):
        dialect: Dialect = choices.load(_DIALECTS, name).DIALECT
        known.update(dict.fromkeys(dialect.methods, dialect))
    if method not in known:
        raise WeightsError(
            f"{where}: quant_method {method!r} is not read; there are: {', '.join(sorted(known))}.",
            code="unsupported_quantization",
            hint="Use another quantisation of this model, or its unquantised weights.",
        )
    return known[method]


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise WeightsError(
            f"{path.name} is not valid JSON: {error}.", code="invalid_json", hint="Copy it again."
        ) from error
    return raw if isinstance(raw, dict) else {}

"""What the user wishes: one field per flag, `None` = decide for me. Never written to after parsing.

A field's metadata is the single source of its flag, its `FREETOKEN_*` name, its config.toml key and
its help. Precedence: flags > environment > config.toml > the model's generation_config > defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from freetoken.core import choices
from freetoken.core.errors import ConfigError, nearest
from freetoken.core.machine import PRESETS
from freetoken.core.units import parse_bytes

BACKENDS = ("auto", "fused", "offload", "cpu", "hybrid")
DEVICES = ("auto", "cuda", "cpu", "sim")
CPU_ACTIVATIONS = ("16bit", "int8")
KV_DTYPES = ("auto", "fp8")
THINKING = ("auto", "on", "off")
WINDOW_KV = ("auto", "states", "pages")
_POSITIVE = 1e-3
"""Least value of a rate in GB/s: zero would stop the simulated clock."""


def _opt(
    kind: Any,
    help: str,
    group: str,
    *,
    default: Any = None,
    choices: tuple[str, ...] | str = (),
    bounds: tuple[float, ...] = (),
) -> Any:
    """One option. `bounds` = (least,) or (least, most) of what a user may write.

    choices   what it may be, or the package whose files are the choices
    """
    least, most = (*bounds, *(-math.inf, math.inf)[len(bounds) :])
    meta = {"kind": kind, "help": help, "group": group, "choices": choices, "least": least, "most": most}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Wishes of one engine. kinds: `bytes` sizes, `rate` a share 0..1, `flag`, int, float, str."""

    model: str | None = _opt(
        str,
        "checkpoint directory, .gguf file, OWNER/NAME or script:FILE (default: the embedded demo)",
        "model",
    )
    served_model_name: str | None = _opt(str, "name that /v1/models shows", "model")
    max_model_len: int | None = _opt(
        int, "context limit in tokens (default: the model's)", "model", bounds=(2,)
    )
    dtype: str | None = _opt(str, "compute dtype", "model", choices=("bfloat16", "float16", "float32"))
    exact: bool = _opt(
        "flag", "row-invariant float32 arithmetic: slow, for tests and research", "model", default=False
    )

    device: str = _opt(str, "where to compute", "device", default="auto", choices=DEVICES)
    machine: str | None = _opt(
        str, "machine preset of the simulated device", "device", choices=tuple(PRESETS)
    )
    gpu: str | None = _opt(str, "which GPU: an index, a UUID or part of its name", "device")
    gpu_memory: int | None = _opt("bytes", "GPU memory to use at most, like 8GiB", "device", bounds=(1,))
    memory_ratio: float | None = _opt("rate", "share of free GPU memory to use (default 0.9)", "device")
    sim_link_bw: float | None = _opt(
        float,
        "simulated link, GB/s; on cuda a slower one than there is, for measuring",
        "device",
        bounds=(_POSITIVE,),
    )
    sim_host_bw: float | None = _opt(float, "simulated host memory, GB/s", "device", bounds=(_POSITIVE,))
    sim_seed: int = _opt(int, "seed of the simulated completion order", "device", default=0)

    moe_backend: str = _opt(
        str, "where routed experts are computed", "experts", default="auto", choices=BACKENDS
    )
    moe_cache_size: int | None = _opt(int, "expert slots on the GPU", "experts", bounds=(1,))
    moe_cache_rate: float | None = _opt("rate", "expert slots as a share of the pool", "experts")
    moe_cache_auto: bool = _opt(
        "flag", "size the expert slots from free memory (the default)", "experts", default=False
    )
    moe_policy: str | None = _opt(
        str,
        "residency policy (default: the best one measured)",
        "experts",
        choices="freetoken.experts.policies",
    )
    cpu_activations: str = _opt(
        str,
        "what the CPU multiplies coded weights with: int8 decodes faster, a little less exact",
        "experts",
        default="16bit",
        choices=CPU_ACTIVATIONS,
    )
    moe_cpu_threads: int | None = _opt(
        int, "threads of the CPU branch (default: what is fastest)", "experts", bounds=(1, 1024)
    )
    moe_cpu_layers: int | None = _opt(int, "first N MoE layers always on the CPU", "experts", bounds=(0,))
    moe_hybrid_max_fetch: int | None = _opt(
        int, "most experts filled per layer-step in hybrid", "experts", bounds=(0,)
    )
    moe_prefetch: int | None = _opt(
        int,
        "tiles of the next layer's likely experts to bring while the link is idle, 0 = none",
        "experts",
        bounds=(0, 32),
    )
    moe_prefill_hit_d2d: bool = _opt(
        "flag", "accepted; resident experts are always used in place", "experts", default=False
    )
    disable_moe_prefill_overlap: bool = _opt(
        "flag", "prefill without a second buffer (for measuring)", "experts", default=False
    )

    kv_reserve_tokens: int | None = _opt(
        int, "KV tokens held back from expert slots (default 8192)", "memory", bounds=(0,)
    )
    num_tokens: int | None = _opt(
        int, "KV capacity in tokens (default: what memory allows)", "memory", bounds=(2,)
    )
    kv_dtype: str = _opt(
        str,
        "how keys and values are kept: fp8 (e4m3) holds twice the tokens, a little less exactly",
        "memory",
        default="auto",
        choices=KV_DTYPES,
    )
    page_size: int | None = _opt(int, "tokens a KV page", "memory", bounds=(1,))
    window_kv: str = _opt(
        str,
        "where sliding-window layers keep their keys and values: a state each request, or the KV pages",
        "memory",
        default="auto",
        choices=WINDOW_KV,
    )
    prefix_cache: bool = _opt("flag", "reuse what earlier prompts have computed", "memory", default=True)
    checkpoint_memory: int | None = _opt(
        "bytes",
        "host memory for saved recurrent states (default: an eighth of what is free)",
        "memory",
        bounds=(0,),
    )
    cold_memory: int | None = _opt(
        "bytes",
        "host memory for KV pages that left the GPU (default: an eighth of what is free; none on CPU)",
        "memory",
        bounds=(0,),
    )
    cold_disk: int = _opt(
        "bytes", "disk space for prefixes that survive a restart", "memory", default=0, bounds=(0,)
    )
    cold_path: str | None = _opt(str, "folder for --cold-disk (default: prefixes in ~/.freetoken)", "memory")
    max_prefill_length: int | None = _opt(
        int, "tokens of a prefill sub-chunk (default 2048)", "memory", bounds=(1,)
    )
    max_running_requests: int | None = _opt(int, "requests in a batch (default 32)", "memory", bounds=(1,))
    max_output_tokens: int | None = _opt(
        int, "default max_tokens of a request (default: to the context's end)", "memory", bounds=(1,)
    )
    prefill_gap_ms: float | None = _opt(
        float, "longest pause a prefill may cause running streams", "memory", bounds=(0,)
    )
    run_ahead: bool | None = _opt(
        "flag", "launch step n+1 before step n is read (default: by device)", "memory"
    )

    thinking: str = _opt(str, "default for requests that don't say", "chat", default="auto", choices=THINKING)
    thinking_budget: int | None = _opt(int, "most tokens of a thinking block", "chat", bounds=(0,))
    tool_parser: str | None = _opt(
        str, "tool call format (default: from the template)", "chat", choices="freetoken.chat.parsers"
    )
    drop_nonces: bool = _opt(
        "flag", "drop lines that a client changes with each request and no model needs", "chat", default=True
    )
    strict_model: bool = _opt("flag", "refuse requests that name another model", "chat", default=False)

    host: str = _opt(str, "address to listen on", "server", default="127.0.0.1")
    port: int = _opt(int, "port to listen on", "server", default=1919)
    api_key: str | None = _opt(
        str, "key that clients must send, several comma-separated (better as FREETOKEN_API_KEY)", "server"
    )
    api_key_file: str | None = _opt(str, "file of keys, one a line", "server")
    max_requests_per_key: int | None = _opt(
        int, "requests that one key (without keys: one address) may run at once", "server", bounds=(1,)
    )
    allowed_origins: str | None = _opt(
        str, "web origins that may call the API, comma-separated (default: none)", "server"
    )
    drain_seconds: float = _opt(
        float, "how long running requests may finish after a stop", "server", default=30.0, bounds=(0,)
    )
    record_routing: str | None = _opt(str, "write a routing trace (.npz) here", "server")
    log_level: str = _opt(
        str,
        "debug, info, warning or error",
        "server",
        default="info",
        choices=("debug", "info", "warning", "error"),
    )
    log_file: str | None = _opt(str, "write the log here", "server")
    log_json: bool = _opt("flag", "log JSON lines", "server", default=False)


def names() -> list[str]:
    return [f.name for f in fields(Options)]


def choices_of(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """What an option with this metadata may be; empty if it is free."""
    known = meta["choices"]
    return tuple(choices.names(known)) if isinstance(known, str) else tuple(known)


def check(options: Options) -> None:
    """ConfigError for a value that no flag takes, in options that didn't come through `parse_value`.

    None, and what is the default, say nothing.
    """
    for f in fields(Options):
        value = getattr(options, f.name)
        if value is not None and value != f.default:
            parse_value(f.name, value, "options")


def parse_value(name: str, value: Any, where: str) -> Any:
    """Turn text or a TOML value into the option's type; ConfigError names the place and the fault."""
    meta = next((f.metadata for f in fields(Options) if f.name == name), None)
    if meta is None:
        raise ConfigError(
            f"{where}: unknown option {name!r}.",
            code="unknown_option",
            hint=nearest(name, names()) or "See: ft config --all",
        )
    try:
        parsed = _convert(meta["kind"], value)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e.message}", code=e.code, hint=e.hint, param=name) from e
    except (TypeError, ValueError, OverflowError) as e:
        raise _invalid(name, value, where, f"expected {_KIND_WORDS[meta['kind']]}") from e
    known = choices_of(meta)
    if known and parsed not in known:
        raise _invalid(name, value, where, f"choose one of {', '.join(known)}", nearest(str(value), known))
    if isinstance(parsed, int | float) and not meta["least"] <= parsed <= meta["most"]:
        most = f" and at most {meta['most']}" if meta["most"] < math.inf else ""
        raise _invalid(name, value, where, f"it must be at least {meta['least']:g}{most}")
    return parsed


_KIND_WORDS: dict[Any, str] = {
    "bytes": "a size like 8GiB",
    "rate": "a share from 0 to 1",
    "flag": "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


def _invalid(name: str, value: Any, where: str, wanted: str, hint: str = "") -> ConfigError:
    return ConfigError(
        f"{where}: {name} is {value!r}, {wanted}.",
        code="invalid_option",
        hint=hint or f"Give another value, or leave {name} out.",
        param=name,
    )


def _convert(kind: Any, value: Any) -> Any:
    """Text or a TOML value to `kind`; nothing is cut, rounded or guessed: 1.5 is no int, true no number."""
    if kind == "flag":
        return _flag(value)
    if kind is str:
        if not isinstance(value, str) or not value:
            raise ValueError(value)
        return value
    if isinstance(value, bool):
        raise TypeError(value)
    if kind == "bytes":
        return parse_bytes(value)
    number = float(value)
    if not math.isfinite(number) or (kind == "rate" and not 0.0 <= number <= 1.0):
        raise ValueError(value)
    if kind is int:
        if number != int(number):
            raise ValueError(value)
        return int(value)
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError(text)
    return text in ("1", "true", "yes", "on")


def merge(*layers: Mapping[str, Any]) -> Options:
    """Build Options from mappings, strongest first; None means not given."""
    chosen: dict[str, Any] = {}
    for layer in reversed(layers):
        chosen.update({k: v for k, v in layer.items() if v is not None})
    return Options(**chosen)

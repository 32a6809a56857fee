"""What is known before anything large is read: a checkpoint's headers, where it will run, what it takes.

Part of the composition root: loads families, formats and devices by name. Every refusal that headers
allow happens here, all faults of a kind at once. Invariant: reads no weights, allocates nothing large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from freetoken.core import choices, cost
from freetoken.core.errors import ConfigError, WeightsError
from freetoken.core.host_memory import host_memory
from freetoken.core.interfaces import (
    Device,
    ModelFamily,
    Numerics,
    StateSpec,
    WeightFormat,
)
from freetoken.core.log import logger
from freetoken.core.model_config import ModelConfig
from freetoken.core.options import Options, check
from freetoken.core.stopwatch import Stopwatch
from freetoken.engine.banks import make_bank, record_formats
from freetoken.engine.budget import Sizes
from freetoken.engine.plan import Facts, default_chunk, macro_tokens
from freetoken.experts.gpu_support import can_compute_here, check_policy, expanded_bytes
from freetoken.experts.native_executor import knows
from freetoken.experts.slots import MIN_SLOTS
from freetoken.kernels.slow_link import behind_copy
from freetoken.layers.rope import table_bytes
from freetoken.native.library import library
from freetoken.quant import _reading as formats
from freetoken.weights.load import Checkpoint

log = logger("build")
Progress = Callable[[str, int], None]
PAGE_SIZE = 16
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

LARGE_BYTES = 40 << 30
"""Device memory beside which activations of tens of thousands of tokens don't matter."""


@dataclass(frozen=True)
class Parts:
    """What is known before the plan: the checkpoint as read, and where it will run."""

    options: Options
    checkpoint: Checkpoint
    family: ModelFamily
    config: ModelConfig
    numerics: Numerics
    device: Device
    formats: tuple[WeightFormat, ...]
    specs: tuple[StateSpec, ...]
    progress: Progress
    notes: tuple[str, ...] = ()
    watch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def page_size(self) -> int:
        return self.options.page_size or PAGE_SIZE


def survey(
    options: Options,
    checkpoint: Checkpoint,
    progress: Progress,
    device: Device | None = None,
    watch: Stopwatch | None = None,
) -> Parts:
    """Read config and headers; ConfigError or WeightsError for what can't be served."""
    check(options)
    watch = watch or Stopwatch()
    with watch.part("checks"):
        family = find_family(checkpoint.model_type)
        config = family.read_config(checkpoint.config)
        family.check(config, checkpoint.source)
        formats.check_packed(checkpoint.source)
    config, note = family.place_windows(config, options.window_kv)
    numerics = _numerics(options, config)
    specs = _specs(family, config, options.page_size or PAGE_SIZE, numerics)
    _check_page_size(options, specs)
    coded = expert_formats(family, config, checkpoint)
    with watch.part("device"):
        device = device or _place(options, config, coded)
    _check_activations(options, device)
    return Parts(
        options=options,
        checkpoint=checkpoint,
        family=family,
        config=config,
        numerics=numerics,
        device=device,
        formats=coded,
        specs=specs,
        progress=progress,
        notes=(note,) if note else (),
        watch=watch,
    )


def _place(options: Options, config: ModelConfig, coded: Sequence[WeightFormat]) -> Device:
    """The device; nobody having named one, a GPU whose kernels don't read these experts is left alone."""
    device = _device(options)
    if device.kernels and config.moe is not None and options.moe_policy is not None:
        check_policy(options.moe_policy)
    if options.device != "auto" or not device.kernels or config.moe is None:
        return device
    if can_compute_here(coded, config.moe):
        return device
    log.warning("the GPU's kernels don't compute this model's experts yet: the CPU does")
    device.close()
    return _device(replace(options, device="cpu"))


def _check_page_size(options: Options, specs: tuple[StateSpec, ...]) -> None:
    """Every kind that keeps pages must allow the wish."""
    kinds = [set(spec.page_sizes) for spec in specs if spec.unit == "page"]
    allowed = sorted(set.intersection(*kinds)) if kinds else []
    if options.page_size is not None and options.page_size not in allowed:
        raise ConfigError(
            f"A KV page of {options.page_size} tokens does not suit this model.",
            code="invalid_option",
            param="page_size",
            hint=f"Use one of: {', '.join(map(str, allowed))}.",
        )


def find_family(model_type: str) -> ModelFamily:
    """Return the family that claims a config's `model_type`."""
    known: dict[str, ModelFamily] = {}
    for name in choices.names("freetoken.models"):
        family: ModelFamily = choices.load("freetoken.models", name).FAMILY
        known.update(dict.fromkeys(family.model_types, family))
    if model_type not in known:
        real = sorted(name for name, family in known.items() if family.has_weights)
        raise WeightsError(
            f"Model type {model_type!r} is not supported; there are: {', '.join(real)}.",
            code="unknown_model_type",
            hint="docs/recipes/add-a-model-family.md says how to add one.",
        )
    return known[model_type]


def _specs(
    family: ModelFamily, config: ModelConfig, page_size: int, numerics: Numerics
) -> tuple[StateSpec, ...]:
    """What the mixers keep; pages may be coded more narrowly than the rest."""
    wide = family.state_specs(config, page_size, numerics.dtype)
    narrow = family.state_specs(config, page_size, numerics.kv)
    return tuple(n if n.unit == "page" else w for w, n in zip(wide, narrow, strict=True))


def check_kv_dtype(parts: Parts) -> None:
    """Narrow keys and values are read by the reference alone."""
    if parts.numerics.kv_dtype is not None and parts.device.kernels:
        raise _no_fp8(parts.options, f"the kernels of device {parts.device.name} don't read them yet")


def _no_fp8(options: Options, reason: str) -> ConfigError:
    return ConfigError(
        f"Keys and values can't be kept in {options.kv_dtype}: {reason}.",
        code="invalid_option",
        param="kv_dtype",
        hint="Leave --kv-dtype out.",
    )


def _numerics(options: Options, config: ModelConfig) -> Numerics:
    narrow = options.kv_dtype != "auto"
    if options.exact and narrow:
        raise _no_fp8(options, "--exact keeps them in float32")
    if options.exact:
        return Numerics(torch.float32, exact=True)
    name = options.dtype or config.dtype
    if name not in _DTYPES:
        raise WeightsError(
            f"The checkpoint's dtype is {name}, which nothing here computes in.",
            code="unknown_dtype",
            hint=f"Choose one with --dtype: {', '.join(_DTYPES)}.",
        )
    int8 = options.cpu_activations == "int8"
    return Numerics(_DTYPES[name], kv_dtype=torch.float8_e4m3fn if narrow else None, int8=int8)


def _check_activations(options: Options, device: Device) -> None:
    """int8 is what the native library alone computes."""
    if options.cpu_activations != "int8":
        return
    if options.exact:
        reason = "--exact computes in float32"
    elif device.owns_memory and device.in_host_memory:
        reason = f"device {device.name} computes both sides with torch"
    elif library() is None:
        reason = "the native library is not here"
    else:
        return
    raise ConfigError(
        f"Activations can't be int8: {reason}.",
        code="invalid_option",
        param="cpu_activations",
        hint="Leave --cpu-activations out.",
    )


def _device(options: Options) -> Device:
    name = options.device
    if name == "auto":
        # Who names a GPU wants one: where it can't be had, the device says why.
        wanted = options.gpu is not None or choices.load("freetoken.devices", "cuda").usable()
        name = "cuda" if wanted and not options.exact else "cpu"
    if options.machine and name != "sim":
        raise ConfigError(
            "--machine needs --device sim.",
            code="invalid_option",
            hint="Add --device sim, or leave --machine out.",
            param="machine",
        )
    if name not in choices.names("freetoken.devices"):
        raise ConfigError(
            f"This version has no device {name!r} yet.",
            code="invalid_option",
            hint="Use --device cpu, or --device sim to see what a GPU would do.",
            param="device",
        )
    device: Device = choices.load("freetoken.devices", name).create(options)
    device.behind_copy = behind_copy
    return device


def expert_formats(
    family: ModelFamily, config: ModelConfig, checkpoint: Checkpoint
) -> tuple[WeightFormat, ...]:
    """The format of each MoE layer's records, by how its first expert is stored."""
    if checkpoint.records is not None:
        return record_formats(checkpoint.records)
    source = checkpoint.source
    return tuple(formats.of_expert(source, names) for names in family.expert_tensors(config, source))


def _sizes(parts: Parts) -> Sizes:
    config, source = parts.config, parts.checkpoint.source
    place = parts.device.torch_device.type
    dense = [n for n in source.names() if ".experts." not in n]
    record = num_experts = bank_bytes = expanded = 0
    if config.moe is not None and parts.formats:
        bank = make_bank(config, parts.formats, parts.checkpoint.records, phantom=True)
        record, bank_bytes = bank.slot_bytes, bank.total_bytes
        num_experts = config.num_moe_layers * config.moe.num_experts
        if parts.device.kernels:
            kinds = (bank.layouts, bank.formats, config.moe.num_experts)
            expanded = expanded_bytes(*kinds, parts.numerics.dtype)
    large = _large_memory(parts.device)
    chunk = parts.options.max_prefill_length or default_chunk(parts.device.owns_memory, large)
    per_hidden = chunk * 40 + macro_tokens(large) * 10
    return Sizes(
        dense_bytes=sum(formats.held_bytes(source, n, place, parts.numerics) for n in dense),
        page_bytes=sum(s.unit_bytes for s in parts.specs if s.unit == "page"),
        page_size=parts.page_size,
        state_bytes=sum(s.unit_bytes for s in parts.specs if s.unit == "state"),
        record_bytes=record,
        num_experts=num_experts,
        bank_bytes=bank_bytes,
        activation_bytes=per_hidden * config.hidden_size
        + 32 * config.vocab_size * 8
        + expanded
        + table_bytes(config.attention, config.max_position),
    )


def _large_memory(device: Device) -> bool:
    return device.kernels and device.memory_bytes >= LARGE_BYTES


def _host_computes(parts: Parts) -> bool:
    """Whether the host can take a share of misses from a device that rings for it."""
    config = parts.config
    if config.moe is None or not parts.formats:
        return False
    bank = make_bank(config, parts.formats, parts.checkpoint.records, phantom=True)
    return knows(bank.layouts, bank.formats, config.moe.activation)


def gather_facts(parts: Parts, name: str) -> Facts:
    options, config, device = parts.options, parts.config, parts.device
    host = host_memory()
    free, host_free = device.free_bytes(), host.free_bytes
    if device.owns_memory:
        free = int(free * (options.memory_ratio if options.memory_ratio is not None else 1.0))
        free = min(free, options.gpu_memory or free)
    else:
        free = min(free, host_free)
    return Facts(
        model_name=name,
        sizes=_sizes(parts),
        experts_per_token=config.num_moe_layers * (config.moe.top_k if config.moe else 0),
        expert_flops=cost.expert_flops(config, 1) if config.moe else 0.0,
        max_position=config.max_position,
        device=device.name,
        owns_memory=device.owns_memory,
        in_host_memory=device.in_host_memory,
        free_bytes=free,
        host_free_bytes=host_free,
        host_limited_by=host.limited_by,
        machine=device.machine,
        has_states=any(s.unit == "state" for s in parts.specs),
        run_ahead=device.run_ahead,
        min_slots=MIN_SLOTS,
        large_memory=_large_memory(device),
        host_computes=not device.kernels or _host_computes(parts),
        notes=parts.notes,
    )

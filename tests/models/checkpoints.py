"""Tiny random checkpoints, written with our own names or by the reference implementation."""

from __future__ import annotations

import json
import math
import os
import struct
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from freetoken.core.interfaces import ModelFamily, WeightSource
from freetoken.models import _tensors, gpt_oss

os.environ["TQDM_DISABLE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
MIN_GAP = 1e-5


class Nothing(WeightSource):
    """A checkpoint without tensors: what a family asks of it is what it stores plainly."""

    def names(self) -> Iterable[str]:
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def dtype(self, name: str) -> torch.dtype:
        raise KeyError(name)

    def read(self, name: str) -> Tensor:
        raise KeyError(name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        raise KeyError(name)

    def close(self) -> None:
        """Nothing is open."""


def random_tensors(
    family: ModelFamily, raw: Mapping[str, Any], *, fused: bool = True, seed: int = 0
) -> dict[str, Tensor]:
    """Every tensor of a config, float32, lively enough that no part of the model is idle."""
    config = family.read_config(raw)
    generator = torch.Generator().manual_seed(seed)
    out = {}
    if family is gpt_oss.FAMILY:
        shapes = gpt_oss.expected(config, Nothing())
    else:
        shapes = _tensors.expected(config, lambda layer: _tensors.expert_shapes(config, fused))
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator)
        out[name] = (
            tensor if len(shape) == 1 else tensor * (0.7 / shape[-1] ** 0.5 if len(shape) > 1 else 1.0)
        )
    return out


def write(path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 1) -> Path:
    """Write config.json and the tensors, with an index if there are several shards."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(raw)))
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[i::shards]}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def write_sparse(path: Path, raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """A checkpoint of bfloat16 zeros that takes no room on disk; returns the bytes it claims to have."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(raw)))
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return at


def write_tiny(
    path: Path, family: ModelFamily, overrides: Mapping[str, Any] | None = None, *, seed: int = 0
) -> Path:
    raw = {**family.TINY, **(overrides or {})}
    return write(path, raw, random_tensors(family, raw, seed=seed))


def oracle(model_class: str, config_class: str, raw: Mapping[str, Any], seed: int = 0) -> Any:
    """A reference model in float32 with random weights everywhere, eager attention."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        import transformers

        settings = {k: v for k, v in raw.items() if k not in ("model_type", "dtype")}
        config = getattr(transformers, config_class)(**settings)
        config._attn_implementation = "eager"
        model = getattr(transformers, model_class)(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise * 0.3)
            else:
                parameter.copy_(noise * (0.9 / parameter.shape[-1] ** 0.5))
    return model


def oracle_logits(model: Any, ids: list[int]) -> tuple[Tensor, float]:
    """float32 [T, V] logits and the smallest gap between a chosen and a refused expert."""
    gaps = [float("inf")]

    def note(module: Any, inputs: Any, output: Any) -> None:
        probs = output[0].float().softmax(-1).sort(-1, descending=True).values
        if module.top_k < probs.shape[-1]:
            gaps.append(float((probs[:, module.top_k - 1] - probs[:, module.top_k]).min()))

    hooks = [
        m.register_forward_hook(note) for m in model.modules() if type(m).__name__.endswith("TopKRouter")
    ]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits, min(gaps)


def settled_oracle(
    model_class: str, config_class: str, raw: Mapping[str, Any], ids: list[int]
) -> tuple[Any, Tensor]:
    """The first random model whose routing on `ids` hangs on no near-tie, and its logits."""
    for seed in range(8):
        model = oracle(model_class, config_class, raw, seed)
        logits, gap = oracle_logits(model, ids)
        if gap > MIN_GAP:
            return model, logits
    raise AssertionError("no seed gives router gaps above 1e-5")

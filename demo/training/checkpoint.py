# ruff: noqa: E501 - sentences and small makers read best on one line
"""Checkpoint shards: reading, writing, and blending of two trained models.

usage: python -m demo.training.checkpoint A B SHARE OUT      writes (1 - SHARE) * A + SHARE * B

A model and one trained on from it blend well: losses stay, and how local routing is lies between the two.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SHARD_BYTES = 13_500_000


def stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as the family's checkpoints hold it: bf16, but float32 for A_log."""
    return tensor.detach().to(torch.float32 if name.endswith("A_log") else torch.bfloat16).cpu().contiguous()


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in float32."""
    return {k: v.float() for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def write(state: dict[str, torch.Tensor], folder: Path) -> int:
    """Write model-0000i-of-0000n.safetensors, each below SHARD_BYTES, and the index; returns the number of shards."""
    shards, size = [{}], 0
    for name, tensor in state.items():
        tensor = stored(name, tensor)
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    index = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1) + "\n"
    )
    return len(shards)


def blend(a: Path, b: Path, share: float, out: Path) -> None:
    first, second = read(a), read(b)
    out.mkdir(parents=True, exist_ok=True)
    write({k: torch.lerp(first[k], second[k], share) for k in first}, out)


if __name__ == "__main__":
    blend(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))

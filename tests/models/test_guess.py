"""The next layer's router, asked early: asked for every layer but the first, and mostly right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

import freetoken
from freetoken.models import qwen3_5_moe
from tests.models.reference_experts import ReferenceExperts
from tests.models.runner import Runner

DEMO = Path(freetoken.__file__).parent / "data" / "demo-model"
TEXT = "<|im_start|>user\nDefine justice, please.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Curious(ReferenceExperts):
    """Asks for every guess."""

    def __init__(self, plain: ReferenceExperts) -> None:
        super().__init__(activation=plain.activation)
        self.matrices, self.biases = plain.matrices, plain.biases
        self.guesses: list[tuple[int, Tensor]] = []

    def look_ahead(self, layer: int, guess: Callable[[], Tensor]) -> None:
        self.guesses.append((layer, guess()))


def test_most_of_the_demo_models_experts_are_guessed_a_layer_ahead() -> None:
    runner = Runner(qwen3_5_moe.FAMILY, DEMO, dtype=torch.bfloat16)
    runner.experts = curious = Curious(runner.experts)
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    runner.run(ids)
    assert runner.config.moe is not None
    layers = runner.config.num_moe_layers
    assert [layer for layer, _ in curious.guesses] == list(range(1, layers))
    chosen = {layer: routing.ids for layer, routing in curious.routed}
    right = [
        len(set(row) & set(guess)) / runner.config.moe.top_k
        for layer, guesses in curious.guesses
        for row, guess in zip(chosen[layer].tolist(), guesses.tolist(), strict=True)
    ]
    chance = runner.config.moe.top_k / runner.config.moe.num_experts
    assert sum(right) / len(right) > 3 * chance

"""The embedded model in bf16 by the equality rule, class 2, and in float32 within 1e-4.

Teacher-forced on what the reference itself generates. The noise is the reference's own: its bf16 logits
against its float32 logits. Ours must stay within four times the largest of it, agree on the best token
wherever the reference's top two are further apart than twice that bound, and be no noisier on average.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

import freetoken
from freetoken.models import qwen3_5_moe
from tests.models import checkpoints
from tests.models.runner import Runner

DEMO = Path(freetoken.__file__).parent / "data" / "demo-model"
PROMPTS = (
    "What is 347 + 586?", "What is 48 times 73?", "Who are you?", "Tell me a joke.", "What can you do?",
    "Define justice.", "What is 1234 + 8765?", "What is 900 - 123?", "My name is Anna.", "What is 77 + 15?",
)  # fmt: skip
GENERATED, END = 40, 8185
SPEECH = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def reference() -> dict[torch.dtype, Any]:
    assert checkpoints.MIN_GAP  # the import silences the reference's progress bars
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        types = (torch.bfloat16, torch.float32)
        return {t: AutoModelForCausalLM.from_pretrained(DEMO, dtype=t).eval() for t in types}


@pytest.fixture(scope="module")
def spoken(reference: dict[torch.dtype, Any]) -> list[tuple[int, list[int]]]:
    """(prompt length, prompt and the reference's greedy answer) for each prompt."""
    tokenizer, out = Tokenizer.from_file(str(DEMO / "tokenizer.json")), []
    for prompt in PROMPTS:
        ids = tokenizer.encode(SPEECH.format(prompt), add_special_tokens=False).ids
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = reference[torch.bfloat16].generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=GENERATED,
                do_sample=False,
                eos_token_id=END,
                pad_token_id=8183,
            )
        out.append((len(ids), done[0].tolist()))
    return out


def oracle(model: Any, spoken: list[tuple[int, list[int]]]) -> Tensor:
    """Logits of the answers' tokens; what a user might say next was never learnt."""
    return torch.cat([checkpoints.oracle_logits(model, ids)[0][n - 1 :] for n, ids in spoken])


@pytest.fixture(scope="module")
def both(reference: dict[torch.dtype, Any], spoken: list[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
    """The reference's logits in bf16 and in float32."""
    bf16, float32 = (oracle(reference[t], spoken) for t in (torch.bfloat16, torch.float32))
    return bf16, float32


def ours(runner: Runner, spoken: list[tuple[int, list[int]]], *, by_token: bool) -> Tensor:
    """By token, all answers grow side by side, as running requests do."""
    if not by_token:
        return torch.cat([runner.run(ids)[n - 1 :] for n, ids in spoken])
    seqs = [runner.add(len(ids)) for _, ids in spoken]
    for seq, (n, ids) in zip(seqs, spoken, strict=True):
        runner.step([(seq, ids[:n])])
    while alive := [
        (seq, [ids[seq.num_computed]])
        for seq, (_, ids) in zip(seqs, spoken, strict=True)
        if seq.num_computed < len(ids)
    ]:
        runner.step(alive)
    return torch.cat([torch.cat(seq.logits)[n - 1 :] for seq, (n, _) in zip(seqs, spoken, strict=True)])


@pytest.mark.parametrize("by_token", [False, True], ids=["whole", "by token"])
def test_bf16_logits_stay_within_four_times_the_reference_noise(
    both: tuple[Tensor, Tensor], spoken: list[tuple[int, list[int]]], by_token: bool
) -> None:
    theirs, truth = both
    runner = Runner(
        qwen3_5_moe.FAMILY,
        DEMO,
        dtype=torch.bfloat16,
        page_size=16,
        num_pages=128,
        num_states=len(PROMPTS) + 1,
    )
    logits = ours(runner, spoken, by_token=by_token)
    noise = (theirs - truth).abs().amax(-1)
    bound = 4 * float(noise.max())
    assert float((logits - theirs).abs().max()) <= bound
    top = theirs.topk(2).values
    differs = logits.argmax(-1) != theirs.argmax(-1)
    assert not (differs & (top[:, 0] - top[:, 1] > 2 * bound)).any()
    excused = int(differs.sum())
    print(f"bound {bound:.2f}, {excused} of {len(logits)} positions excused")
    assert excused < 0.01 * len(logits)
    assert float((logits - truth).abs().amax(-1).mean()) <= 1.25 * float(noise.mean())


def test_float32_logits_equal_the_reference(
    both: tuple[Tensor, Tensor], spoken: list[tuple[int, list[int]]]
) -> None:
    theirs = both[1][: sum(len(ids) - n + 1 for n, ids in spoken[:2])]
    for exact in (False, True):
        runner = Runner(
            qwen3_5_moe.FAMILY, DEMO, exact=exact, page_size=16, num_pages=128, num_states=len(PROMPTS) + 1
        )
        logits = ours(runner, spoken[:2], by_token=False)
        assert float((logits - theirs).abs().max() / theirs.abs().max()) <= 1e-4
        assert torch.equal(logits.argmax(-1), theirs.argmax(-1))


def test_exact_mode_is_bit_equal_over_chunks_on_the_demo_model(spoken: list[tuple[int, list[int]]]) -> None:
    runner = Runner(
        qwen3_5_moe.FAMILY, DEMO, exact=True, page_size=16, num_pages=128, num_states=len(PROMPTS) + 1
    )
    length, ids = spoken[0]
    assert torch.equal(runner.run(ids), runner.run(ids, [3, length - 3] + [1] * (len(ids) - length)))


def test_positions_beyond_the_trained_length_are_served(tmp_path: Path) -> None:
    """max_position is the caller's to raise; the last position works and the next one is refused."""
    raw = {**qwen3_5_moe.TINY, "max_position_embeddings": 2048}
    tensors = checkpoints.random_tensors(qwen3_5_moe.FAMILY, raw)
    runner = Runner(qwen3_5_moe.FAMILY, checkpoints.write(tmp_path, raw, tensors), num_pages=520)
    seq = runner.add(2049)
    runner.step([(seq, [5] * 2040)])
    runner.step([(seq, [6] * 8)])
    assert torch.isfinite(torch.cat(seq.logits)).all()
    with pytest.raises(IndexError):
        runner.step([(seq, [7])])

"""Draws follow the parameters, depend on (seed, position) only, and bad logits are seen."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from freetoken.core.request import SamplingParams
from freetoken.engine.sampler import NEVER, Draw, Sampler, adjust, mask_bias, uniform


def draw(
    position: int = 0, row: int = 0, history=None, num_prompt: int = 0, forced: int = -1, banned=(), **params
) -> Draw:
    return Draw(SamplingParams(**params), row, position, history, num_prompt, forced, tuple(banned))


def drawn(logits: torch.Tensor, one: Draw) -> int:
    return Sampler(one.row + 1, torch.device("cpu")).sample(logits[None], [one]).read()[0][0]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_uniform_is_inside_the_open_unit_interval(seed, position):
    assert 0 < uniform(seed, position) < 1


def test_uniform_looks_uniform():
    values = np.array([uniform(3, i) for i in range(4000)])
    counts = np.histogram(values, bins=10, range=(0, 1))[0]
    assert counts.min() > 330 and counts.max() < 470


def test_greedy_takes_the_largest_and_penalties_change_it():
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert drawn(logits, draw(temperature=0)) == 1
    history = np.array([1], np.int32)
    assert drawn(logits, draw(temperature=0, presence_penalty=2.0, history=history)) == 2
    assert drawn(logits, draw(temperature=0, repetition_penalty=2.0, history=history)) == 2


def test_frequency_penalty_counts_the_output_only():
    history = np.array([0, 0, 2, 2, 2], np.int32)
    out = adjust(torch.zeros(3), draw(frequency_penalty=0.5, history=history, num_prompt=2))
    assert out.tolist() == [0.0, 0.0, -1.5]


def test_bias_and_bans_apply():
    out = adjust(torch.zeros(3), draw(logit_bias=((1, 2.0),), banned=[0]))
    assert out.tolist() == [-float("inf"), 2.0, 0.0]


@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([1.0, 0.6]),
    st.sampled_from([0.0, 0.2]),
)
def test_no_draw_leaves_the_allowed_set(seed, top_k, top_p, min_p):
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, 3.0])
    token = drawn(logits, draw(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p))
    probs = logits.softmax(-1)
    order = probs.argsort(descending=True).tolist()
    allowed = order[: top_k or 5]
    kept, mass = [], 0.0
    total = sum(float(probs[i]) for i in allowed)
    for i in allowed:
        share = float(probs[i]) / total
        if not kept or (mass < top_p and share >= min_p * float(probs[order[0]]) / total):
            kept.append(i)
        mass += share
    assert token in kept


def test_frequencies_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0])
    tokens = [drawn(logits, draw(position=i, seed=5)) for i in range(3000)]
    shares = np.bincount(tokens, minlength=3) / 3000
    assert np.abs(shares - logits.softmax(-1).numpy()).max() < 0.03


def test_a_draw_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    logits = torch.randn(5, 50)
    draws = [draw(position=i, row=i, seed=9, top_p=0.9) for i in range(5)]
    together, _ = Sampler(5, torch.device("cpu")).sample(logits, draws).read()
    assert together == [drawn(logits[i], draws[i]) for i in range(5)]


def test_last_tokens_hold_each_rows_token_and_bad_rows_are_marked():
    sampler = Sampler(4, torch.device("cpu"))
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 0.0], [5.0, 0.0]])
    out = sampler.sample(
        logits, [draw(row=2, temperature=0), draw(row=1, temperature=0), draw(row=3, forced=1)]
    )
    assert sampler.last_tokens[2] == 1 and sampler.last_tokens[3] == 1
    assert out.read()[1] == [False, True, False]


def test_logprobs_are_the_models_own():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    out = Sampler(1, torch.device("cpu")).sample(
        logits, [draw(temperature=0, logprobs=2, logit_bias=((0, 50.0),))]
    )
    assert out.read()[0] == [0]
    expected = logits[0].log_softmax(-1)
    assert out.logprobs[0].logprob == float(expected[0])
    assert [i for i, _ in out.logprobs[0].top] == [2, 1]


@given(st.integers(0, 2**32), st.sets(st.integers(0, 39), min_size=1), st.sampled_from([0.0, 1.0]))
def test_only_what_a_mask_allows_is_drawn(seed, ids, temperature):
    flags = np.zeros(64, np.uint8)
    flags[list(ids)] = 1
    mask = np.packbits(flags, bitorder="little").view(np.int32)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(seed=seed, temperature=temperature, top_k=5, logit_bias=((0, 90.0),))
    assert drawn(logits, Draw(params, 0, 0, mask=mask)) in ids
    greedy = drawn(logits, Draw(SamplingParams(temperature=0), 0, 0, mask=mask))
    assert greedy == max(ids, key=lambda i: float(logits[i]))


def test_ids_beyond_a_mask_are_not_allowed():
    bias = mask_bias(np.array([5], np.int32), 40)
    assert (bias == 0).nonzero().flatten().tolist() == [0, 2] and bool((bias[3:] == NEVER).all())

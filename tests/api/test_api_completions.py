"""Text completions as the official client sees them: four prompt forms, echo, legacy log probs."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_llm import say


def forms(prompt):
    return prompt if isinstance(prompt, str) else [int(i) for i in prompt]


@pytest.mark.parametrize(
    ("prompt", "arrived"),
    [
        ("once", ["once"]),
        (["once", "twice"], ["once", "twice"]),
        ([65, 66], [[65, 66]]),
        ([[65], [66, 67]], [[65], [66, 67]]),
    ],
)
def test_a_prompt_in_each_form_reaches_the_model(serve, prompt, arrived):
    served = serve()
    answer = served.client.completions.create(model="m", prompt=prompt, max_tokens=4)
    assert [forms(a.prompt) for a in served.llm.asked] == arrived
    assert all(a.prompt.dtype == np.int32 for a in served.llm.asked if not isinstance(a.prompt, str))
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (i, "Hello!", "stop") for i in range(len(arrived))
    ]
    assert answer.usage.prompt_tokens == 7 * len(arrived)
    assert answer.usage.completion_tokens == 3 * len(arrived)


def test_a_streamed_completion_equals_the_whole_one(serve):
    client = serve(lambda asked: say(*f"{asked.prompt} and {asked.params.seed}", reason="length")).client
    fields = {"model": "m", "prompt": ["a", "b"], "n": 2, "seed": 5, "echo": True}
    whole = client.completions.create(**fields)
    texts = {c.index: "" for c in whole.choices}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in client.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == {c.index: c.text for c in whole.choices}
    assert texts == {0: "aa and 5", 1: "aa and 6", 2: "bb and 5", 3: "bb and 6"}
    assert set(reasons.values()) == {"length"} and len(reasons) == 4
    assert usage == whole.usage
    assert whole.usage.prompt_tokens == 14


def test_echo_shows_ids_as_text(serve):
    answer = serve().client.completions.create(model="m", prompt=[72, 105], echo=True)
    assert answer.choices[0].text == "HiHello!"


@pytest.mark.parametrize("stream", [False, True])
def test_legacy_log_probs_name_each_token_and_its_place(serve, stream):
    client = serve(lambda _: say("ab", "c", top=2)).client
    reply = client.completions.create(model="m", prompt="x", logprobs=2, stream=stream)
    parts = [c.choices[0].logprobs for c in reply] if stream else [reply.choices[0].logprobs]
    parts = [p for p in parts if p]
    assert [t for p in parts for t in p.tokens] == ["ab", "c"]
    assert [o for p in parts for o in p.text_offset] == [0, 2]
    assert [lp for p in parts for lp in p.token_logprobs] == [-0.5, -0.5]
    assert all(top == {"alt0": -1.0, "alt1": -2.0} for p in parts for top in p.top_logprobs)

"""Scripted agents at full length: what is computed again, against what nothing could have spared.

The agents edit as the real ones do; the answers are scripted, so the token lists are known beforehand.
The bound is computed from the token lists alone.
"""

import random
import time

import numpy as np
import pytest

from freetoken.chat.codec import ChatCodec
from freetoken.engine.build import DEMO_MODEL

from . import sessions
from .counting import Counting, common

CODEC = ChatCodec.from_directory(DEMO_MODEL)


def answered(turns: sessions.Turns, said: sessions.Turns) -> tuple:
    """The prompt, and prompt plus what the model says: as the template writes the turn back."""
    prompt = CODEC.encode(sessions.conversation(turns))
    after = CODEC.encode(sessions.conversation((*turns, said[0]))).ids
    same = common(prompt.ids, after)
    # The answer's tokens follow the generation tail, up to and with the end of the turn.
    text = CODEC.tokenizer.decode(after[same:], skip_special=False)
    if said[0].reasoning:
        text = f"{said[0].reasoning}\n</think>\n\n" + text.partition("</think>")[2].lstrip("\n")
    whole = np.concatenate([prompt.ids, CODEC.tokenizer.encode(text.split("<|im_end|>")[0] + "<|im_end|>")])
    return prompt, whole


class Tally:
    """One agent's turns: tokens computed, and the least that the token lists allow."""

    def __init__(self, **wishes) -> None:
        self.bench = Counting(**wishes)
        self.rows: list[tuple[int, int, int]] = []

    def turn(self, turns: sessions.Turns, said: sessions.Turns, *, group: str = "a") -> None:
        prompt, whole = answered(turns, said)
        name = f"t{len(self.rows)}"
        least = self.bench.bound(prompt.ids)
        number = self.bench.say(name, prompt, whole, group)
        self.bench.run(limit=100000)
        assert self.bench.tokens(name) == [int(t) for t in whole[len(prompt.ids) :]]
        done = self.bench.model.prefilled[number]
        assert done == len(prompt.ids) - self.bench.outputs[name][-1].cached_tokens
        self.rows.append((len(prompt.ids), done, least))
        self.bench.known.append(whole)

    @property
    def ratio(self) -> float:
        """Computed by bound, the first turn left out: it is cold for everyone."""
        return sum(row[1] for row in self.rows[1:]) / sum(row[2] for row in self.rows[1:])

    def report(self, name: str) -> str:
        computed, bound, asked = (sum(row[i] for row in self.rows[1:]) for i in (1, 2, 0))
        return f"{name}: asked {asked}, computed {computed}, bound {bound}, ratio {self.ratio:.3f}"


def openclaw(base: int, turns: int) -> Tally:
    """Thoughts of all but the last assistant turn are stripped."""
    rng, tally = random.Random(1), Tally()
    history = sessions.opening(rng, base)
    for i in range(turns):
        said = sessions.step(rng, i, 150)
        tally.turn(sessions.strip_thinking(history), said)
        history = (*history, *said)
    return tally


def opencode(base: int, turns: int, keep: int) -> Tally:
    """Tool results but the newest few become a placeholder."""
    rng, tally = random.Random(2), Tally()
    history = sessions.opening(rng, base)
    for i in range(turns):
        said = sessions.step(rng, i, 200, thinks=False)
        tally.turn(sessions.clear_old_results(history, keep), said)
        history = (*history, *said)
    return tally


def claude_code(base: int, turns: int) -> Tally:
    """Sub-agents with a prompt of their own run between the main loop's turns; a title call comes first."""
    rng, tally = random.Random(3), Tally()
    main = sessions.opening(rng, base)
    helper = sessions.opening(rng, base // 3)
    tally.turn(sessions.opening(rng, 300), (sessions.step(rng, 900, 5, thinks=False)), group="title")
    for i in range(turns):
        said = sessions.step(rng, i, 120)
        tally.turn(main, said, group="main")
        main = (*main, *said)
        for k in range(2):
            task = (helper[0], sessions.opening(rng, 60)[1])
            for j in range(2):
                helped = sessions.step(rng, 1000 + 10 * i + 2 * k + j, 80)
                tally.turn(task, helped, group=f"helper{k}")
                task = (*task, *helped)
    return tally


SHORT, LONG = 1500, 24500


@pytest.mark.parametrize(
    ("name", "tally"),
    [
        ("openclaw", lambda base: openclaw(base, 6)),
        ("opencode", lambda base: opencode(base, 7, 3)),
        ("swe-agent", lambda base: opencode(base, 7, 1)),
        ("claude code", lambda base: claude_code(base, 3)),
    ],
)
def test_an_agent_computes_little_more_than_its_edits_force(name, tally):
    found = tally(SHORT)
    print(found.report(name))
    assert found.ratio <= 1.10, found.report(name)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "tally"),
    [
        ("openclaw", lambda: openclaw(LONG, 13)),
        ("opencode", lambda: opencode(LONG, 20, 6)),
        ("swe-agent", lambda: opencode(LONG, 20, 5)),
        ("claude code", lambda: claude_code(LONG, 6)),
    ],
)
def test_an_agent_at_full_length(name, tally):
    start = time.perf_counter()
    found = tally()
    print(found.report(name), f"{time.perf_counter() - start:.0f} s", *found.rows)
    assert found.ratio <= 1.10, found.report(name)

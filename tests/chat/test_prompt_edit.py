"""What was done to a prompt since an earlier one is told from ids and checksums."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import vocabularies

from freetoken.chat.codec import ChatCodec
from freetoken.chat.conversation import Conversation, Message, Tool, ToolCall
from freetoken.chat.prompt_edit import Asked, Edit, find_edit
from freetoken.chat.prompt_history import PromptHistory

RULES = "Be brief, be kind, answer in whole sentences and never guess what a file holds before you read it."
TOOLS = tuple(Tool(name, f"What {name} does, told at length.") for name in ("read", "write", "run"))
SYSTEM, USER = Message("system", RULES), Message("user", "What does the first file say about the weather?")
ANSWER = Message("assistant", "", "It is in the folder.", (ToolCall("call1", "read", {"path": "a.txt"}),))
RESULT = Message("tool", "Sun in the morning, rain at noon, snow in the evening.", tool_call_id="call1")
MORE = Message("user", "And the second one? Please read that as well, and tell me which is older.")
BASE = Conversation((SYSTEM, USER, ANSWER, RESULT, MORE), TOOLS)


@functools.cache
def codec() -> ChatCodec:
    return ChatCodec.from_directory(vocabularies.DEMO)


def edit_of(new: Conversation, old: Conversation = BASE, answer: str = "") -> Edit:
    asked = [codec().asked(c, codec().encode(c)) for c in (old, new)]
    prompt = codec().encode(new)
    history = PromptHistory()
    history.remember(asked[0])
    if answer:
        history.answered(asked[0], codec().tokenizer.encode(answer).tolist())
    earlier = history.remember(asked[1])
    return find_edit(asked[1], earlier, functools.partial(codec().place_of, new, prompt))


def with_turn(index: int, turn: Message) -> Conversation:
    return replace(BASE, messages=(*BASE.messages[:index], turn, *BASE.messages[index + 1 :]))


def test_a_prompt_that_goes_on_was_not_edited() -> None:
    begun = replace(BASE, messages=(SYSTEM, USER))
    longer = replace(BASE, messages=BASE.messages[:4])
    text = codec().encode(longer).text.removeprefix(codec().encode(begun).text)
    found = edit_of(longer, begun, text.partition("<|im_start|>")[0].rstrip())
    assert found.cause == "" and found.shared > len(codec().encode(begun).ids)
    assert edit_of(BASE).cause == "" and edit_of(BASE).shared == len(codec().encode(BASE).ids) - 1


@pytest.mark.parametrize(
    ("new", "cause", "where"),
    [
        (with_turn(3, replace(RESULT, content="[Old result cleared]")), "text_changed", "turn 3 (tool)"),
        (with_turn(4, replace(MORE, content="Never mind.")), "text_changed", "turn 4 (user)"),
        (replace(BASE, tools=TOOLS[::-1]), "tools_reordered", "tools"),
        (replace(BASE, tools=TOOLS[:2]), "tools_changed", "tools"),
        (replace(BASE, messages=(SYSTEM, USER, MORE)), "turns_dropped", "turn 2 (user)"),
        (replace(BASE, messages=(SYSTEM, USER, Message("user", "Wait."), *BASE.messages[2:])),
         "turns_inserted", "turn 2 (user)"),
        (with_turn(0, replace(SYSTEM, content=RULES.replace("brief", "slow"))), "nonce", "turn 0 (system)"),
        (with_turn(0, replace(SYSTEM, content=RULES.partition("never")[0] + "x " * 200)),
         "text_changed", "turn 0 (system)"),
    ],
)  # fmt: skip
def test_the_cause_and_the_place_of_an_edit(new: Conversation, cause: str, where: str) -> None:
    found = edit_of(new)
    assert (found.cause, found.where) == (cause, where)
    ids = [codec().encode(c).ids for c in (BASE, new)]
    assert np.array_equal(ids[0][: found.shared], ids[1][: found.shared])
    assert ids[0][found.shared] != ids[1][found.shared]


def test_a_thought_that_is_left_out_is_told_from_other_words() -> None:
    thinking = Conversation((SYSTEM, USER), TOOLS)
    assert codec().encode(thinking).starts_in_thinking
    back = replace(thinking, messages=(SYSTEM, USER, Message("assistant", "Sun."), MORE))
    said = "The folder has it.\n</think>\n\nSun.<|im_end|>"
    assert edit_of(back, thinking, said).cause == "thinking_dropped"
    off = replace(thinking, thinking=False)
    back = replace(off, messages=(SYSTEM, USER, Message("assistant", "Sun, then rain."), MORE))
    found = edit_of(back, off, "Sun and rain.<|im_end|>")
    assert found.cause in ("answer_rewritten", "template_drift") and found.where == "turn 2 (assistant)"


def test_the_same_turns_rendered_otherwise_are_the_templates_doing() -> None:
    said = replace(BASE, messages=(SYSTEM, USER), thinking=True)
    assert edit_of(replace(said, thinking=False), said).cause in ("template_drift", "")


def test_a_strangers_prompt_is_new() -> None:
    stranger = Conversation((Message("system", "Translate."), Message("user", "Guten Tag")))
    assert edit_of(stranger) == Edit()


def test_a_nonce_at_the_very_beginning_is_found_by_the_other_turns() -> None:
    changed = with_turn(0, replace(SYSTEM, content=f"id=7f3a9c {RULES}"))
    old = with_turn(0, replace(SYSTEM, content=f"id=90bb12 {RULES}"))
    found = edit_of(replace(changed, tools=()), replace(old, tools=()))
    assert found.cause == "nonce" and found.shared < 32


def test_quoted_control_text_does_not_shift_the_place() -> None:
    quoting = replace(USER, content="Why does <|im_start|>user\n<|im_end|> stand there, again and again?")
    old = with_turn(1, quoting)
    new = replace(old, messages=(*old.messages[:3], replace(RESULT, content="gone"), MORE))
    assert edit_of(new, old).where == "turn 3 (tool)"


def test_the_history_keeps_its_bounds_and_lets_a_longer_prompt_replace_its_beginning() -> None:
    history = PromptHistory(max_prompts=4, max_tokens=1000)
    rng = np.random.default_rng(0)
    for n in range(50):
        ids = rng.integers(0, 1000, 90 + n, np.int32)
        asked = Asked("", ids, len(ids))
        history.remember(asked)
        history.answered(asked, [1, 2, 3])
        assert 0 < history.num_tokens <= 1000
    assert len(history.remember(Asked("", np.zeros(5, np.int32), 5))) <= 4
    history = PromptHistory()
    first = Asked("", np.arange(50, dtype=np.int32), 50)
    history.remember(first)
    history.answered(first, range(50, 60))
    history.remember(Asked("", np.arange(100, dtype=np.int32), 100))
    assert history.num_tokens == 100
    history.forget(first)
    assert history.num_tokens == 100

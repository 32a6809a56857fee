"""Whose conversation a request belongs to, as agents say it; and the memory endpoints' forms."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from freetoken.api.sessions import SessionFields, session_of
from freetoken.chat.conversation import Conversation, Message
from freetoken.core.errors import CapacityError

ONE, TWO = (Conversation((Message("system", text), Message("user", "Hi"))) for text in ("a", "b"))
OLD_USER_ID = "user_12ab_account__session_0f0f"
NEW_USER_ID = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "0f0f"})


def name(headers=None, conversation=ONE, **fields):
    return session_of(headers or {}, SessionFields(**fields), conversation)


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-claude-code-session-id": "s1"}, {}),
        ({"session-id": "s1"}, {"user": "u"}),
        ({"x-session-id": "s1"}, {}),
        ({"x-session-affinity": "s1"}, {}),
        ({}, {"prompt_cache_key": "s1"}),
        ({}, {"metadata": {"session_id": "s1"}}),
        ({}, {"metadata": {"user_id": OLD_USER_ID}}),
        ({}, {"metadata": {"user_id": NEW_USER_ID}}),
    ],
)
def test_a_named_conversation_is_one_whatever_it_says(headers, fields):
    found = name(headers, ONE, **fields)
    assert found and found == name(headers, TWO, **fields)
    assert len(found) == 16


@pytest.mark.parametrize(
    "fields", [{"user": "u"}, {"safety_identifier": "u"}, {"metadata": {"user_id": "u"}}]
)
def test_a_persons_conversations_are_told_apart_by_their_openings(fields):
    assert name({}, ONE, **fields) == name({}, ONE, **fields) != name({}, TWO, **fields)
    assert name({}, None, **fields)


def test_a_line_that_changes_with_every_request_makes_no_other_conversation():
    head = "x-anthropic-billing-header: cc_version=2.1; cch={};\n"
    one, two = (
        replace(ONE, messages=(Message("system", head.format(i) + "a"), ONE.messages[1])) for i in "12"
    )
    assert name({}, one, user="u") == name({}, two, user="u") == name({}, ONE, user="u")


def test_a_sub_agent_is_a_conversation_of_its_own():
    main = {"x-claude-code-session-id": "s1"}
    assert name(main) != name(main | {"x-claude-code-agent-id": "7"})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"user": 7, "metadata": [1]},
        {"metadata": {"user_id": 3}},
        {"prompt_cache_key": {"a": 1}},
        {"user": ""},
    ],
)
def test_what_is_malformed_names_nobody(fields):
    assert name({}, ONE, **fields) == ""


def test_unreadable_json_in_a_user_id_is_a_persons_name():
    assert name({}, ONE, metadata={"user_id": "{broken"}) != ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "prompt_cache_key": "k"}),
        ("/v1/completions", {"prompt": "Hi", "prompt_cache_key": "k"}),
        ("/v1/responses", {"input": "Hi", "prompt_cache_key": "k"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9,
                          "metadata": {"user_id": OLD_USER_ID}}),
    ],
)  # fmt: skip
def test_each_protocol_hands_the_session_on(serve, path, body):
    served = serve()
    served.post(path, **body)
    served.post(path, **{k: v for k, v in body.items() if k not in ("prompt_cache_key", "metadata")})
    first, second = (asked.params.session for asked in served.llm.asked)
    assert first and second == ""


def test_receipts_are_listed_newest_first_with_what_was_reused(serve):
    served = serve()
    for _ in range(3):
        served.chat()
    until = time.monotonic() + 5
    while len((listed := served.http.get("/v1/requests?limit=2").json())["data"]) < 2:
        assert time.monotonic() < until
    assert listed["object"] == "list" and len(listed["data"]) == 2
    assert "engine" not in listed["data"][0] and listed["data"][0]["prefix"][0]["reused"] == 0
    assert served.http.get("/v1/requests?limit=x").status_code == 400
    assert served.http.get("/v1/requests?limit=0").json()["data"] == []


def test_a_resize_says_what_came_of_it_and_a_wish_that_does_not_fit_is_the_callers(serve):
    served = serve()
    assert served.post("/v1/cache/resize", memory="64MiB").status_code == 200
    assert served.post("/v1/cache/resize", memory=1 << 20).status_code == 200
    assert served.llm.resized == [64 << 20, 1 << 20]
    assert served.http.get("/v1/cache").json()["object"] == "cache"
    for wrong in ("much", -1, 0, "1e999GiB", 1 << 62):
        reply = served.post("/v1/cache/resize", memory=wrong)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "memory"), wrong
    assert served.post("/v1/cache/resize", memory=[1]).status_code == 400
    served.llm.resize_error = CapacityError("Too small.", code="pool_in_use")
    reply = served.post("/v1/cache/resize", memory="1MiB")
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "pool_in_use")


def test_resizes_that_wait_for_the_engine_keep_nobody_from_asking(serve):
    served = serve()
    served.llm.may_resize.clear()
    with ThreadPoolExecutor(40) as many:
        waiting = [many.submit(served.post, "/v1/cache/resize", memory=1 << 20) for _ in range(40)]
        time.sleep(0.2)
        try:
            assert served.chat().status_code == 200
        finally:
            served.llm.may_resize.set()
        assert [one.result().status_code for one in waiting] == [200] * 40


def test_a_resize_takes_no_field_that_it_does_not_know(serve):
    reply = serve().post("/v1/cache/resize", memory=1 << 20, slots=4)
    assert reply.status_code == 400 and "slots" in reply.json()["error"]["message"]

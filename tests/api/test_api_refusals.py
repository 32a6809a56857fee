"""Bad input: each fault is a 400-class answer with a stable code, a param and the next step."""

from __future__ import annotations

import openai
import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def user(content: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}]}


CHAT_FAULTS = [
    ({"messages": [{"role": 5, "content": "x"}]}, "invalid_type", "messages[0].role"),
    ({"messages": "hello"}, "invalid_type", "messages"),
    ({"messages": None}, "invalid_type", "messages"),
    ({"messages": []}, "empty_messages", "messages"),
    ({"messages": [{"content": "x"}]}, "missing_field", "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_role", "messages[0]"),
    (user(5), "invalid_content", "messages[0].content"),
    (
        user([{"type": "text", "text": "What is it?"}, PICTURE]),
        "unsupported_content",
        "messages[0].content[1]",
    ),
    (user([{"type": "input_audio", "input_audio": {}}]), "unsupported_content", "messages[0].content[0]"),
    ({"temperature": 2.5}, "out_of_range", "temperature"),
    ({"temperature": -0.1}, "out_of_range", "temperature"),
    ({"temperature": "hot"}, "invalid_type", "temperature"),
    ({"top_p": 1.5}, "out_of_range", "top_p"),
    ({"top_k": -2}, "out_of_range", "top_k"),
    ({"min_p": 1.1}, "out_of_range", "min_p"),
    ({"presence_penalty": 3}, "out_of_range", "presence_penalty"),
    ({"frequency_penalty": -3}, "out_of_range", "frequency_penalty"),
    ({"repetition_penalty": 0}, "out_of_range", "repetition_penalty"),
    ({"max_tokens": 0}, "out_of_range", "max_tokens"),
    ({"max_completion_tokens": -1}, "out_of_range", "max_completion_tokens"),
    ({"n": 0}, "out_of_range", "n"),
    ({"n": 65}, "out_of_range", "n"),
    ({"seed": 1 << 64}, "out_of_range", "seed"),
    ({"stop": ["a", ""]}, "out_of_range", "stop"),
    ({"stop": ["a"] * 17}, "out_of_range", "stop"),
    ({"stop": 5}, "invalid_type", "stop"),
    ({"stop_token_ids": [-1]}, "out_of_range", "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "invalid_type", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "out_of_range", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "out_of_range", "logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, "out_of_range", "top_logprobs"),
    ({"top_logprobs": 2}, "missing_field", "logprobs"),
    ({"thinking_budget": -1}, "out_of_range", "thinking_budget"),
    ({"reasoning_effort": "heroic"}, "out_of_range", "reasoning_effort"),
    (
        {"chat_template_kwargs": {"enable_thinking": "yes"}},
        "invalid_type",
        "chat_template_kwargs.enable_thinking",
    ),
    ({"tool_choice": "required"}, "unknown_tool", "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "unknown_tool",
        "tool_choice",
    ),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "out_of_range", "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "unsupported_tool", "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "missing_field", "tools[0].function.name"),
    ({"response_format": {"type": "xml"}}, "unsupported_response_format", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "missing_field", "response_format"),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "unsupported_response_format",
        "guided_regex",
    ),
    ({"guided_choice": []}, "invalid_type", "guided_choice"),
    ({"structured_outputs": "a"}, "invalid_type", "structured_outputs"),
    ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    ({"guided_json": "{}"}, "invalid_type", "guided_json"),
    ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
    ({"max_tokens": 5000}, "context_length_exceeded", "messages"),
]
TEXT_FAULTS = [
    ({}, "missing_field", "prompt"),
    ({"prompt": None}, "invalid_prompt", "prompt"),
    ({"prompt": []}, "invalid_prompt", "prompt"),
    ({"prompt": [[]]}, "invalid_prompt", "prompt"),
    ({"prompt": ["a", 1]}, "invalid_prompt", "prompt"),
    ({"prompt": [1, True]}, "invalid_prompt", "prompt"),
    ({"prompt": [-1]}, "invalid_prompt", "prompt"),
    ({"prompt": [1 << 31]}, "invalid_prompt", "prompt"),
    ({"prompt": "x", "suffix": "y"}, "unsupported_parameter", "suffix"),
    ({"prompt": "x", "best_of": 3}, "unsupported_parameter", "best_of"),
    ({"prompt": "x", "logprobs": 21}, "out_of_range", "logprobs"),
    ({"prompt": "x", "logprobs": 1, "echo": True}, "unsupported_parameter", "echo"),
    ({"prompt": ["x"] * 65}, "out_of_range", "prompts times n"),
    ({"prompt": "x", "max_tokens": 0}, "out_of_range", "max_tokens"),
]
BODIES = [
    (b"", "invalid_json"),
    (b'{"messages": [', "invalid_json"),
    (b"\xff\xfe", "invalid_json"),
    (b'{"temperature": NaN}', "invalid_json"),
    (b'{"messages": [{"role": "user", "content": ' + b"[" * 100_000, "invalid_json"),
    (b"[]", "invalid_type"),
    (b"5", "invalid_type"),
    (b"{}", "missing_field"),
]


def assert_refused(response, code, param=None, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error"
    assert error["message"].rstrip().endswith(".") and len(error["message"].split(". ")) >= 2


def test_every_faulty_chat_request_has_its_code(serve):
    served = serve()
    for fields, code, param in CHAT_FAULTS:
        for stream in (False, True):
            assert_refused(served.chat(**fields, stream=stream), code, param)
    assert not served.llm.asked


def test_every_faulty_text_request_has_its_code(serve):
    served = serve()
    for fields, code, param in TEXT_FAULTS:
        assert_refused(served.post(TEXT, **fields), code, param)
    assert not served.llm.asked


def test_bodies_that_are_no_request_have_their_code(serve):
    served = serve()
    for body, code in BODIES:
        response = served.http.post(CHAT, content=body)
        assert_refused(response, code, "messages" if code == "missing_field" else None)


def test_a_body_beyond_the_limit_is_refused_unread(serve, monkeypatch):
    monkeypatch.setattr("freetoken.api.body.MAX_BYTES", 1000)
    response = serve().http.post(CHAT, content=b" " * 1001)
    assert_refused(response, "request_too_large", None, 413)


def test_fields_that_services_invent_are_ignored(serve):
    extras = {"service_tier": "auto", "store": True, "metadata": {"a": "b"}, "user": "u", "made_up": [1]}
    assert serve().chat(**extras, response_format={"type": "text"}, modalities=["text"]).status_code == 200


def test_the_official_client_sees_its_own_exceptions_with_our_codes(serve):
    served = serve(strict_model=True)
    with pytest.raises(openai.BadRequestError) as bad:
        served.client.chat.completions.create(model="scripted", messages=[], temperature=1)
    assert (bad.value.code, bad.value.param) == ("empty_messages", "messages")
    with pytest.raises(openai.NotFoundError) as missing:
        served.client.chat.completions.create(model="gpt-x", messages=user("x")["messages"])
    assert missing.value.code == "model_not_found"
    assert "'scripted'" in missing.value.message


def test_an_over_long_prompt_is_worded_as_agents_expect(serve):
    error = serve().chat(max_tokens=5000).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens. However, you requested 5007 tokens" in error["message"]


def test_an_unknown_path_names_its_neighbours_and_a_wrong_method_the_right_one(serve):
    served = serve()
    missing = served.post("/chat/completions", model="m")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "unknown_path"
    assert "/v1/chat/completions" in missing.json()["error"]["message"]
    wrong = served.http.get(CHAT)
    assert wrong.status_code == 405
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


def test_an_unforeseen_fault_is_a_500_that_says_nothing_of_the_prompt(serve, caplog):
    prompt = "sec" + "ret"

    def broken(asked):
        raise ValueError(prompt)

    response = serve(broken).chat()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text + caplog.text
    assert "unexpected ValueError" in caplog.text

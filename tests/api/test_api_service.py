"""What runs here and how it fares: models, health while loading, figures, the page, the log line."""

from __future__ import annotations

import json
import logging
import re
import time

import openai
import pytest
from scripted_llm import finish, say

from freetoken.api.observe import Served
from freetoken.api.receipts import Receipts
from freetoken.chat.events import TextDelta
from freetoken.core.errors import NotFoundError, WeightsError
from freetoken.core.generate import Status


def test_the_model_list_names_the_model_and_its_context(serve):
    client = serve().client
    card = client.models.list().data[0]
    assert (card.id, card.object, card.owned_by, card.created) == (
        "scripted",
        "model",
        "freetoken",
        1_700_000_000,
    )
    assert card.model_extra["max_model_len"] == card.model_extra["context_length"] == 4096
    assert client.models.retrieve("scripted") == card


def test_any_name_is_served_unless_the_server_is_strict(serve):
    client = serve().client
    assert client.models.retrieve("org/other").model_extra["root"] == "scripted"
    strict = serve(strict_model=True).client
    with pytest.raises(openai.NotFoundError):
        strict.models.retrieve("org/other")
    hi = [{"role": "user", "content": "Hi"}]
    assert strict.chat.completions.create(model="scripted", messages=hi).model == "scripted"


def test_while_loading_health_counts_up_and_requests_are_asked_to_wait(serve):
    served = serve(status=Status("loading", 40))
    health = served.http.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "loading", "percent": 40})
    for stream in (False, True):
        busy = served.chat(stream=stream)
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "loading")
        assert int(busy.headers["retry-after"]) >= 1
    assert served.http.get("/v1/models").status_code == 200
    served.llm.current_status = Status("ok")
    assert served.http.get("/health").json() == {"status": "ok", "percent": 100}
    assert served.chat().status_code == 200


def test_the_official_client_waits_for_a_loading_server_by_itself(serve):
    served = serve(status=Status("loading", 99))
    calls = []

    def status() -> Status:
        calls.append(time.monotonic())
        return Status("loading", 99) if len(calls) == 1 else Status("ok")

    served.llm.status = status
    client = served.client.with_options(max_retries=1)
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == "Hello!"


def test_a_failed_load_says_why(serve):
    error = WeightsError("Shard 3 is cut short.", code="truncated_shard", hint="Fetch it again.")
    served = serve(status=Status("failed", 30, error))
    health = served.http.get("/health")
    assert health.status_code == 503
    assert (health.json()["status"], health.json()["error"]["code"]) == ("failed", "truncated_shard")
    refused = served.chat().json()["error"]
    assert refused["code"] == "failed"
    assert "Shard 3 is cut short. Fetch it again." in refused["message"]


def test_unknown_paths_share_one_metric(serve):
    served = serve(fresh=True)
    for i in range(3):
        served.http.get(f"/nothing/{i}")
    assert 'freetoken_requests_total{path="other",status="404"} 3.0' in served.http.get("/metrics").text


def test_the_page_tells_a_person_what_to_do_and_fetches_nothing(serve):
    served = serve()
    served.llm.model_name = "<b>model</b>"
    reply = served.http.get("/")
    assert reply.headers["content-type"].startswith("text/html")
    assert f"curl {served.base}/v1/chat/completions" in reply.text
    assert "&lt;b&gt;model&lt;/b&gt;" in reply.text and "<b>model" not in reply.text
    assert not re.search(r"""(src|href)=["'](https?:)?//|@import|<script""", reply.text)
    assert served.http.head("/").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_each_request_gets_one_log_line_without_its_text(serve, caplog, stream):
    caplog.set_level(logging.INFO, "freetoken")
    served = serve(lambda _: [0.02, *say("mauve", " answer", reason="length")])
    body = {"messages": [{"role": "user", "content": "mauve question"}], "stream": stream}
    reply = served.http.post("/v1/chat/completions?secret=mauve", json=body)
    served.http.get("/v1/models")  # the line above it is written once the answer is out
    lines = [r.getMessage() for r in caplog.records if "/v1/chat" in r.getMessage()]
    assert len(lines) == 1
    pattern = (
        r"POST /v1/chat/completions 200 in=7 out=2 cached=0 ttft=0\.\d+s [\d.]+ tok/s finish=length "
        r"[\d.]+s id=(\w+)"
    )
    found = re.fullmatch(pattern, lines[0])
    assert found and found[1] == reply.headers["x-request-id"]
    assert "mauve" not in caplog.text


def test_a_path_cannot_forge_a_log_line(serve, caplog):
    caplog.set_level(logging.INFO, "freetoken")
    serve().http.get("/x%0aPOST%20/v1/forged%20200")
    assert not any("\n" in r.getMessage() for r in caplog.records if "GET" in r.getMessage())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    ],
)
def test_a_receipt_tells_where_a_requests_time_and_tokens_went(serve, path, body, stream):
    served = serve(lambda _: [TextDelta("a"), 0.1, TextDelta("b"), finish(tokens=5, cached=4)])
    reply = served.post(path, **body, stream=stream)
    request_id = reply.headers["x-request-id"]
    until = time.monotonic() + 5
    while (found := served.http.get(f"/v1/requests/{request_id}")).status_code == 404:
        assert time.monotonic() < until
        time.sleep(0.01)
    receipt = found.json()
    assert receipt["tokens"] == {"prompt": 7, "cached": 4, "computed": 3, "completion": 5}
    assert 0 < receipt["seconds"]["to_first_token"] < receipt["seconds"]["total"]
    assert receipt["seconds"]["total"] >= 0.1 and receipt["finish"] == "stop"
    assert receipt["engine"]["experts_hits"] == 0 and receipt["shared"] is False
    assert receipt["bytes"]["link"] == 0 and "disk_read" in receipt["bytes"]
    assert "Hi" not in found.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    ],
)
def test_an_answer_carries_its_receipt_on_request(serve, path, body):
    served = serve(lambda _: [TextDelta("a"), finish(tokens=5, cached=4)])
    header = {"x-freetoken-receipt": "true"}
    whole = served.http.post(path, json=body, headers=header)
    stream = served.http.post(path, json={**body, "stream": True}, headers=header)
    frames = [line[6:] for line in stream.text.splitlines() if line.startswith("data: {")]
    assert all("receipt" not in json.loads(frame) for frame in frames[:-1])
    for reply, last in ((whole, whole.json()), (stream, json.loads(frames[-1]))):
        receipt = last["receipt"]
        assert receipt["id"] == reply.headers["x-request-id"] and receipt["path"] == path
        assert receipt["tokens"]["completion"] == 5 and receipt["seconds"]["total"] > 0
        assert "link" in receipt["bytes"]
    assert "receipt" not in served.post(path, **body).json()
    assert "receipt" not in served.post(path, **body, stream=True).text


def test_there_are_receipts_of_generating_requests_only_and_of_the_latest(serve):
    served = serve()
    missing = served.http.get("/v1/requests/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")
    refused = served.chat(temperature=9)
    assert served.http.get(f"/v1/requests/{refused.headers['x-request-id']}").status_code == 404


def test_old_receipts_make_room_and_neighbours_are_said_to_share():
    receipts = Receipts(lambda: {"engine": {"steps": 3}}, most=2)
    figures = [Served(finish="stop") for _ in range(4)]
    receipts.begin(figures[0])
    receipts.end(figures[0], "/p", 200)
    for one in figures[1:3]:
        receipts.begin(one)
    for one in figures[1:3]:
        receipts.end(one, "/p", 200)
    receipts.begin(figures[3])
    receipts.end(figures[3], "/p", 200)
    assert [receipts.get(f.id)["shared"] for f in figures[2:]] == [True, False]
    for one in figures[:2]:
        with pytest.raises(NotFoundError):
            receipts.get(one.id)

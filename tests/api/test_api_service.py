"""What runs here and how it fares: models, health while loading, figures, the page, the log line."""

from __future__ import annotations

import logging
import re
import time

import openai
import pytest
from scripted_llm import say, think_then_call

from freetoken.core.errors import WeightsError
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


def test_figures_are_served_as_json_and_for_prometheus(serve):
    served = serve(lambda _: think_then_call(), fresh=True)
    served.chat()
    served.chat(stream=True)
    served.chat(n=0)
    assert served.http.get("/v1/stats").json()["experts"] == {"hits": 3, "misses": 1}
    text = served.http.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines["freetoken_engine_experts_hits"] == "3.0"
    assert lines['freetoken_requests_total{path="/v1/chat/completions",status="200"}'] == "2.0"
    assert lines['freetoken_requests_total{path="/v1/chat/completions",status="400"}'] == "1.0"
    assert lines["freetoken_completion_tokens_total"] == "42.0"
    assert lines["freetoken_prompt_tokens_total"] == "14.0"
    assert lines["freetoken_cached_tokens_total"] == "8.0"
    assert lines["freetoken_ttft_seconds_count"] == "2.0"


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

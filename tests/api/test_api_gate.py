"""Who may call: keys, origins of web pages, host names."""

from __future__ import annotations

import openai
import pytest

from freetoken.api.auth import is_loopback


def test_without_the_key_nothing_but_the_page_and_health_answers(serve):
    served = serve(api_key="s3cret")
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/").status_code == 200
    for path in ("/v1/models", "/v1/stats", "/metrics"):
        refused = served.http.get(path)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    assert served.chat().status_code == 401
    assert not served.llm.asked


def test_the_key_is_taken_in_both_usual_headers(serve):
    served = serve(api_key="s3cret")
    assert served.client.models.list().data[0].id == "scripted"
    assert served.http.get("/v1/models", headers={"x-api-key": "s3cret"}).status_code == 200
    for wrong in ("s3cre", "s3crett", "schlüssel"):
        header = {"x-api-key": wrong.encode()}
        assert served.http.get("/v1/models", headers=header).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        served.client.with_options(api_key="wrong").models.list()


def test_a_page_of_another_origin_may_not_call(serve):
    served = serve()
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://[::1", "://", "http://"):
        refused = served.http.get("/v1/models", headers={"origin": origin})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "forbidden_origin"
        assert "access-control-allow-origin" not in refused.headers
    own = served.http.get("/v1/models", headers={"origin": served.base})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers


def test_an_allowed_origin_may_call_and_preflight(serve):
    served = serve(allowed_origins="https://ui.example, https://b.example", api_key="k")
    headers = {"origin": "https://ui.example", "authorization": "Bearer k"}
    answer = served.http.get("/v1/models", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://ui.example"
    asking = {"origin": "https://b.example", "access-control-request-method": "POST"}
    assert served.http.options("/v1/chat/completions", headers=asking).status_code == 200
    refused = served.http.get("/v1/models", headers={**headers, "origin": "https://evil.example"})
    assert refused.status_code == 403


def test_a_rebound_name_is_refused_on_loopback(serve):
    served = serve()
    for host in ("evil.example", "evil.example:1919", "localhost.evil.example", "127.0.0.1.evil.example"):
        refused = served.http.get("/health", headers={"host": host})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden_host")
    for host in ("localhost", "LOCALHOST:1919", "app.localhost:5", "127.0.0.1", "[::1]:1919"):
        assert served.http.get("/health", headers={"host": host}).status_code == 200


def test_a_server_open_to_the_network_answers_to_any_name(serve):
    served = serve(host="0.0.0.0")
    assert served.base.startswith("http://127.0.0.1:")
    assert served.http.get("/health", headers={"host": "box.lan:1919"}).status_code == 200


def test_loopback_is_told_by_address_not_by_looks():
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.8.8.8", "::1", "a.localhost"]))
    assert not any(map(is_loopback, ["", "127.0.0.1.example", "notlocalhost", "10.0.0.1", "0.0.0.0"]))

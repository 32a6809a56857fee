"""The API's description: whole, true to the routes, and what schemathesis makes of it ends in no fault."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from starlette.testclient import TestClient
from test_control_text import CHAT, MESSAGES, RESPONSES
from test_fuzz import RealWords

from freetoken.api import openapi
from freetoken.api.app import create_app
from freetoken.chat.codec import ChatCodec
from freetoken.core.options import Options
from freetoken.engine.build import DEMO_MODEL

DOCUMENT: dict[str, Any] = json.loads(openapi.document())
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
EXAMPLES = [10, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]


@pytest.fixture(scope="module")
def llm() -> RealWords:
    llm = RealWords()
    llm.prepare(ChatCodec.from_directory(DEMO_MODEL))
    return llm


def test_the_document_is_served_and_every_reference_leads_somewhere(serve):
    served = serve()
    assert served.http.get("/openapi.json").json() == DOCUMENT
    assert DOCUMENT["openapi"] == "3.1.0"
    text = json.dumps(DOCUMENT)
    for piece in text.split('"$ref": "#/components/schemas/')[1:]:
        assert piece[: piece.index('"')] in DOCUMENT["components"]["schemas"]


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_described_operation_exists(serve, path, method):
    reply = serve().http.request(method, path.replace("{model}", "m").replace("{id}", "x"), content=b"{}")
    assert reply.status_code != 405
    assert reply.status_code != 404 or reply.json()["error"]["code"] != "unknown_path"


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)],
)
def test_real_requests_fit_the_description(path, body):
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": DOCUMENT["components"]}
    jsonschema.validate(body, whole)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**body, "temperature": "hot"}, whole)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_described_request_ends_in_a_fault_of_ours(llm, path, method, examples):
    schemathesis = pytest.importorskip("schemathesis")
    app = create_app(llm, Options())
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]
    generation = schemathesis.GenerationMode
    client = TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 1))

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=generation.POSITIVE))
    def never_a_fault(case: Any) -> None:
        where = case.formatted_path
        content = json.dumps(case.body).encode() if method == "post" else None
        reply = client.request(method, where, content=content)
        assert reply.status_code < 500, (where, content, reply.text[:500])
        if reply.status_code >= 400:
            assert reply.json()["error"]["code"] not in ("", "internal_error")

    with client:
        never_a_fault()

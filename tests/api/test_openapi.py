"""The API's description: whole, true to the routes, and what schemathesis makes of it ends in no fault."""

from __future__ import annotations

import json
import random
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
EXAMPLES = [(10, 500), pytest.param(2000, 2000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
REQUIRED = {"model", "messages", "input", "prompt", "memory", "max_tokens"}
_ABSENT: Any = object()


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


def recombined(bodies: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    """One more request from what was generated: each field as some body has it, or left out as by some."""
    names = sorted({name for body in bodies for name in body})
    fields = {name: rng.choice(bodies).get(name, _ABSENT) for name in names}
    whole = rng.choice(bodies)
    for name in REQUIRED & set(names):
        fields[name] = whole.get(name, _ABSENT)
    return {name: value for name, value in fields.items() if value is not _ABSENT}


@pytest.mark.parametrize(("examples", "cases"), EXAMPLES)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_described_request_ends_in_a_fault_of_ours(llm, path, method, examples, cases):
    """Generating a body costs schemathesis twenty times what answering it costs: most are recombined."""
    schemathesis = pytest.importorskip("schemathesis")
    app = create_app(llm, Options())
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]
    generation = schemathesis.GenerationMode
    client = TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 1))
    bodies: list[dict[str, Any]] = []

    def check(where: str, body: Any) -> None:
        content = json.dumps(body).encode() if method == "post" else None
        reply = client.request(method, where, content=content)
        assert reply.status_code < 500, (where, content, reply.text[:500])
        if reply.status_code >= 400:
            assert reply.json()["error"]["code"] not in ("", "internal_error")

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=generation.POSITIVE))
    def never_a_fault(case: Any) -> None:
        if isinstance(case.body, dict):
            bodies.append(case.body)
        check(case.formatted_path, case.body)

    with client:
        never_a_fault()
        rng = random.Random(path)
        for _ in range(cases - len(bodies) if bodies else 0):
            check(path, recombined(bodies, rng))

"""What this server serves and how it fares: /v1/models, /health, /v1/stats. Plain JSON shapes.

Owns the model-name rule: any name is served by the loaded model, unless `strict_model` is set.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from freetoken.api.errors import RETRY_AFTER_S
from freetoken.api.face import LanguageModel
from freetoken.core.errors import BusyError, NotFoundError
from freetoken.core.options import Options


def check_model(llm: LanguageModel, options: Options, asked: str | None) -> str:
    """Return the name to echo; NotFoundError `model_not_found` if the name is refused."""
    if not asked or asked == llm.model_name:
        return llm.model_name
    if options.strict_model:
        raise NotFoundError(
            f"The model {asked!r} is not served here.",
            code="model_not_found",
            hint=f"Ask for {llm.model_name!r}, or start the server without --strict-model.",
            param="model",
        )
    return asked


def check_ready(llm: LanguageModel) -> None:
    """Raise BusyError `loading` or `failed` unless the model can answer."""
    status = llm.status()
    if status.state == "loading":
        raise BusyError(
            f"The model is loading ({status.percent} %).",
            code="loading",
            hint=f"Try again in {RETRY_AFTER_S} seconds; /health shows the progress.",
        )
    if status.state == "failed":
        why = str(status.error) if status.error else "See the server's log."
        raise BusyError(f"The model could not be loaded. {why}", code="failed")


def health(llm: LanguageModel) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body): 200 only when requests are taken."""
    status = llm.status()
    body: dict[str, Any] = {"status": status.state, "percent": status.percent}
    if status.error is not None:
        body["error"] = {"code": status.error.code, "message": str(status.error)}
    return (200 if status.state == "ok" else 503), body


def card(llm: LanguageModel, name: str) -> dict[str, Any]:
    """One entry of the model list, limits null while loading; `name` may be an alias of the model.

    It carries the fields of OpenAI's and of Anthropic's entry.
    """
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": llm.created,
        "created_at": datetime.fromtimestamp(llm.created, timezone.utc).isoformat(),
        "owned_by": "freetoken",
        "root": llm.model_name,
        "max_model_len": llm.max_model_len or None,
        "context_length": llm.max_model_len or None,
    }


def listing(llm: LanguageModel) -> dict[str, Any]:
    """The model list: one model, one page, whatever the protocol."""
    name = llm.model_name
    cards = [card(llm, name)]
    return {"object": "list", "data": cards, "has_more": False, "first_id": name, "last_id": name}

"""From a request to its next Draw: stop ids, forced thinking ends, history. Integers only.

Knows no logits. Decides on what the host has read, so it runs after `collect` and before `sample`.
"""

from __future__ import annotations

from freetoken.core.errors import DeviceError, FreeTokenError
from freetoken.core.request import FinishReason, Request
from freetoken.engine.sampler import Draw


def next_draw(request: Request, eos_ids: tuple[int, ...]) -> Draw:
    """Describe how the request's next token is drawn."""
    p = request.params
    banned: tuple[int, ...] = ()
    forced, constraint = forced_id(request), request.submit.constraint
    if request.num_output < p.min_tokens:
        banned = (*eos_ids, *p.stop_ids)
    return Draw(
        params=p,
        row=request.row,
        position=request.num_tokens,
        history=request.tokens if p.needs_history else None,
        num_prompt=request.num_prompt,
        forced_id=forced,
        banned=banned,
        mask=constraint.mask() if constraint is not None and forced < 0 else None,
    )


def forced_id(request: Request) -> int:
    """The id that a script or a used-up thinking budget forces next, or -1."""
    script = request.params.forced_ids
    if request.num_output < len(script):
        return script[request.num_output]
    budget = request.params.think
    if budget is None or request.think_spent < budget.max_tokens:
        return -1
    return budget.forced_ids[request.think_spent - budget.max_tokens]


def accepts(request: Request, token_id: int, eos_ids: tuple[int, ...]) -> bool:
    """Let the answer's form follow a drawn token; False if it can't (a forced one may not fit)."""
    constraint = request.submit.constraint
    if constraint is None or token_id in eos_ids or token_id in request.params.stop_ids:
        return True
    return constraint.advance(token_id)


def note_token(request: Request, token_id: int) -> None:
    """Append a drawn token and follow the thinking block it opens, prolongs or closes."""
    request.append(token_id)
    budget = request.params.think
    if budget is None:
        return
    if request.think_spent < 0:
        if token_id == budget.open_id:
            request.think_spent = 0
        return
    closed = request.think_spent < budget.max_tokens and token_id == budget.close_id
    request.think_spent += 1
    if closed or request.think_spent == budget.max_tokens + len(budget.forced_ids):
        request.think_spent = -1


def finish_reason(
    request: Request, token_id: int, eos_ids: tuple[int, ...], limit: int
) -> FinishReason | None:
    """Why the request ends after `token_id` was appended, or None."""
    p = request.params
    if token_id in p.stop_ids or (token_id in eos_ids and not p.ignore_eos):
        return FinishReason.STOP
    if request.num_output >= p.max_tokens or request.num_tokens >= limit:
        return FinishReason.LENGTH
    return None


def broke_its_form() -> FreeTokenError:
    return FreeTokenError(
        "The answer can't follow the form that was asked for.",
        code="grammar_failed",
        hint="Simplify the schema or grammar, or raise the thinking budget.",
    )


def not_a_number() -> DeviceError:
    return DeviceError(
        "The model's output is not a number.",
        code="nan_logits",
        hint="Run ft verify; the checkpoint or a kernel is at fault.",
    )

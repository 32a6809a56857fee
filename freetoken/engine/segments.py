"""Scheduled work as the model is told of it."""

from __future__ import annotations

import numpy as np

from freetoken.core.batch import Segment
from freetoken.engine.scheduler import Work


def segment_of(work: Work) -> Segment:
    """The id of a token that nobody has read yet is -1: the device knows it."""
    r = work.request
    ids = r.token_ids[work.start : work.start + work.num_tokens]
    if work.start + work.num_tokens > r.num_tokens:
        ids = np.full(1, -1, np.int32)
    anchors: tuple[int, ...] = ()
    if work.num_tokens > 1:
        cuts = (*r.submit.anchor_positions, *(position for position, _ in work.saves))
        anchors = tuple(a for a in cuts if work.start < a < work.start + work.num_tokens)
    return Segment(
        ids,
        work.start,
        tuple(r.page_ids),
        state_id=max(r.state_id, 0),
        row=r.row,
        wants_logits=work.wants_logits,
        anchors=anchors,
        saves=work.saves,
        request=r.number,
        is_decode=work.start >= r.num_prompt and work.num_tokens == 1,
    )

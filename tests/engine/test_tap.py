"""A tap on routing sees every row, also where decode steps are otherwise recorded and played."""

from __future__ import annotations

import pytest

from freetoken.core.options import Options
from freetoken.engine.build import build
from freetoken.engine.tap import RoutingTap

from .served import Served, text_ids


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_every_row_of_a_prompt_and_its_answer_is_told(device: str) -> None:
    built = build(Options(device=device, max_model_len=128))
    rows: list[int] = []
    tap = RoutingTap(
        built.engine.runner.experts,
        lambda layer, ids, requests, phases: rows.append(len(ids)) if not layer else None,
    )
    built.engine.runner.experts = tap
    built.engine.on_job = tap.expect_job
    served = Served(built)
    served.submit("a", text_ids(built, 1, 20), 9)
    served.step()
    while not served.engine.idle:
        served.step()
    served.built.close()
    assert sum(rows) >= 20 + 8

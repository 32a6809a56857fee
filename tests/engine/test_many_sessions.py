"""Many sessions at once over the toy: edits, aborts, preemption, resizes; every answer is the cold one's."""

import pytest

from freetoken.core.machine import preset
from freetoken.devices.sim import SimDevice

from .crowd import Asked, Crowd, Habits
from .toy import Bench, expected

TOKENS = 16


class ToyCrowd(Crowd):
    def verify(self, asked: Asked) -> None:
        want = expected(asked.ids, TOKENS, eos=False)
        assert asked.tokens == (want[: len(asked.tokens)] if asked.is_aborted else want), asked.name


def toy_crowd(seed: int, **wishes) -> tuple[ToyCrowd, Bench]:
    bench = Bench(max_running_requests=8, max_prefill_length=32, kv_reserve_tokens=16, **wishes)
    memory, page_bytes = bench.engine.plan.memory, bench.engine.memory._sizes.page_bytes
    fixed = memory.activation_bytes + memory.num_states * memory.state_bytes
    habits = Habits(
        range(1, 97), (20, 6), longest=90, tokens=TOKENS, budgets=(fixed, page_bytes, 64, 130),
        anchor_ids=(7, 8, 9),
    )  # fmt: skip
    return ToyCrowd(bench.engine, habits, seed), bench


@pytest.mark.parametrize("job_bytes", [0, 1])
@pytest.mark.parametrize(
    "requests", [300, pytest.param(10000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_a_crowd_of_sessions_gets_the_cold_answers(requests, job_bytes):
    device = SimDevice(preset("4060-laptop"), memory_bytes=1 << 30, seed=3)
    sizes = {"pages": 110, "slots": 150, "units": 4, "cold": (1 << 16) * job_bytes}
    crowd, bench = toy_crowd(1, device=device, job_bytes=job_bytes, run_ahead=bool(job_bytes), **sizes)
    counts = crowd.run(requests)
    bench.check_empty()
    print(counts)
    assert counts["aborted"] > requests // 50 and counts["reusing"] >= 0.7 * requests, counts
    assert counts["hits_after_preemption"] >= requests // 50, counts
    assert counts["restores_from_host"] >= requests // 10, counts
    assert counts["across_a_resize"] >= requests // 50 and counts["resizes"] >= 3, counts
    assert not job_bytes or counts["revived"] > requests // 100, counts

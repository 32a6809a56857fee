"""The columns of `ft bench policy`: which policies are compared, what each needs, how it is run.

Knows policies by file name and replay's rules; doesn't print. A column that a trace can't support says
why instead of giving a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freetoken.bench._belady import belady
from freetoken.bench.replay import Counts, Reads, replay, with_hindsight, without_prefills
from freetoken.bench.traces import Trace
from freetoken.core import choices
from freetoken.core.interfaces import Ids, Policy

POLICIES = "freetoken.experts.policies"
NEEDS_PREFILL = "the trace holds no prefill"


@dataclass(frozen=True)
class Column:
    """One way to decide residency.

    policy   file name in experts/policies; empty = the offline optimum
    blind    not told of prefills
    prior    seeded with the trace's own decode frequencies (hindsight)
    fills    order of fills: "" = the policy's own, "routed" = ascending id, else another policy's name
    partial  only a share of the misses is filled, the rest is computed on the CPU
    live     may serve: it knows the past only
    """

    key: str
    label: str
    policy: str = ""
    needs_prefill: bool = False
    prior: bool = False
    blind: bool = False
    fills: str = ""
    partial: bool = False
    live: bool = False
    placed: bool = False


COLUMNS = (
    Column("lru", "LRU", "lru", live=True),
    Column("static_blind", "static, routing-blind", "static", blind=True),
    Column("static", "static by frequency (hindsight)", "static", prior=True),
    Column("static_prefill", "static from prefill", "static_prefill", needs_prefill=True),
    Column("lru_seeded", "LRU seeded by prefill", "lru_seeded", needs_prefill=True, live=True),
    Column("decayed", "decayed frequency + recency", "decayed", live=True),
    Column("two_speed", "two-speed frequency, layers ahead", "two_speed", live=True),
    Column("lru_part", "LRU, part filled, as routed", "lru", partial=True),
    Column("lru_part_hot", "LRU, part filled, hottest first", "lru", fills="two_speed", partial=True),
    Column("two_speed_part", "two-speed, part filled, as routed", "two_speed", fills="routed", partial=True),
    Column("two_speed_part_hot", "two-speed, part filled, hottest first", "two_speed", partial=True),
    Column("belady", "Belady (knows the future)"),
    Column("belady_placed", "Belady, free placement at prefills", placed=True),
)


class FillOrder(Policy):
    """A policy whose fills another policy orders; without one they stand as routed."""

    def __init__(self, victims: Policy, fills: Policy | None) -> None:
        self.victims, self.fills = victims, fills
        self.name = victims.name

    def reset(self, num_experts_total: int, num_slots: int, experts_per_token: int) -> None:
        for policy in self._both():
            policy.reset(num_experts_total, num_slots, experts_per_token)

    def touch(self, expert_ids: Sequence[int], step: int) -> None:
        for policy in self._both():
            policy.touch(expert_ids, step)

    def seed(self, expert_ids: Sequence[int], counts: Sequence[int], step: int) -> None:
        for policy in self._both():
            policy.seed(expert_ids, counts, step)

    def place(self, count: int) -> list[int]:
        return self.victims.place(count)

    def order_victims(
        self, resident: Sequence[int] | Ids, count: int, step: int, lacks: Sequence[int] | Ids | None = None
    ) -> list[int]:
        return self.victims.order_victims(resident, count, step, lacks)

    def order_fills(self, missing: Sequence[int], step: int) -> list[int]:
        return self.fills.order_fills(missing, step) if self.fills else list(missing)

    def _both(self) -> list[Policy]:
        return [self.victims, *([self.fills] if self.fills else [])]


def make_policy(name: str) -> Policy:
    policy: Policy = choices.load(POLICIES, name).POLICY()
    return policy


def unsupported(column: Column, reads: Reads) -> str:
    """Return why a trace can't support a column; empty if it can."""
    return NEEDS_PREFILL if column.needs_prefill and not reads.prefills else ""


def run_column(
    column: Column, trace: Trace, reads: Reads, num_slots: int, *, share: float, warm_up: int
) -> Counts:
    """Replay one column at one capacity. `share` of the misses is filled in partial columns, else all."""
    if not column.policy:
        places = {0, *(at for at, _, _ in reads.prefills)} if column.placed else ()
        return belady(reads, num_slots, place_at=places, warm_up=warm_up)
    policy = make_policy(column.policy)
    if column.fills:
        policy = FillOrder(policy, None if column.fills == "routed" else make_policy(column.fills))
    if column.blind:
        reads = without_prefills(reads)
    if column.prior:
        reads = with_hindsight(reads)
    filled = share if column.partial else 1.0
    return replay(trace, reads, policy, num_slots, share=filled, warm_up=warm_up)

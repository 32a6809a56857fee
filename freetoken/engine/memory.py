"""Live memory: KV pages, states and expert slots traded while requests run.

Owns the pools and moves their boundaries at safe points. Order of a change: validate, shrink what
shrinks (move live tails, rename, unmap), then grow what grows; a failure puts the old sizes back.
"""

from __future__ import annotations

from freetoken.core.errors import CapacityError
from freetoken.core.interfaces import Device, ExpertBackend, Pool
from freetoken.core.log import logger
from freetoken.core.units import format_bytes
from freetoken.engine.budget import Sizes, divide
from freetoken.engine.plan import Plan, resize_demand, without_slots
from freetoken.engine.scheduler import Scheduler

log = logger("memory")


class Memory:
    """The pools of one engine: `kv` is named by the scheduler, slots belong to the backend."""

    def __init__(self, plan: Plan, sizes: Sizes, device: Device, kv: Pool, experts: ExpertBackend) -> None:
        self.plan = plan
        self.state_bytes = sizes.state_bytes
        # Memory shared with the host is not handed out whole: what the pools take is the budget.
        self.budget_bytes = plan.memory.total_bytes if device.owns_memory else plan.memory.used_bytes
        self.num_slots = plan.memory.num_slots
        self.unplanned_bytes = 0
        self._sizes = sizes if device.owns_memory else without_slots(sizes)
        self._device, self._experts = device, experts
        self._kv = kv

    def resize_budget(self, scheduler: Scheduler, total_bytes: int) -> None:
        """Serve on with `total_bytes` of device memory, more or less than before.

        CapacityError, with nothing changed, when what runs does not fit.
        """
        demand = resize_demand(self.plan, self._pages_to_keep(scheduler, total_bytes) + 1)
        division = divide(total_bytes, self._sizes, demand)
        self._apply(scheduler, division.num_pages, division.num_slots)
        self.budget_bytes = total_bytes

    def hold(self, scheduler: Scheduler) -> int:
        """Give slots back for what the system sees beyond the limit; how many bytes that was.

        Plans know pools and weights to the byte, but what kernels' code, graphs and caches of freed tensors
        take shows only once all have run. So it is looked at then, and is the plan's from then on.
        """
        over = self._device.over_bytes()
        if not over:
            return 0
        count = -(-over // max(self._sizes.record_bytes, 1))
        left = self.num_slots - count
        if self.plan.backend not in ("offload", "hybrid") or left < self.plan.min_slots:
            log.warning(
                "%s of the GPU's memory beyond the limit are taken, and no expert slots can give way. "
                "Lower --num-tokens, --max-running-requests or --max-prefill-length.",
                format_bytes(over),
            )
            return 0
        self._apply(scheduler, self._kv.num_units, left)
        freed = count * self._sizes.record_bytes
        self.budget_bytes -= freed
        self.unplanned_bytes += freed
        log.info("%s were not in the plan: %d expert slots, %d fewer", format_bytes(over), left - 1, count)
        return freed

    def _pages_to_keep(self, scheduler: Scheduler, total_bytes: int) -> int:
        """What runs needs, and of the prefix cache the part that the new budget is of the old one."""
        cache = scheduler.reuse.cache
        pinned = scheduler.pages.num_used - cache.num_pages + cache.pinned_pages()
        spare = max(scheduler.pages.num_used - pinned, 0)
        return pinned + min(spare, spare * total_bytes // max(self.budget_bytes, 1))

    def grow_pages(self, scheduler: Scheduler, count: int, *, spare: bool = False) -> bool:
        """Take memory of the least valuable slots for at least `count` more pages; False if it can't.

        spare  cached prefixes would have to go otherwise: they get no more than an eighth of the slots
        """
        if not self._device.owns_memory or self.plan.backend not in ("offload", "hybrid"):
            return False
        pages = min(self._kv.max_units, self._kv.num_units + max(count, self._kv.num_units // 8))
        if pages - self._kv.num_units < count:
            return False
        slots = self.num_slots - -(
            -(pages - self._kv.num_units) * self._sizes.page_bytes // self._sizes.record_bytes
        )
        least = self.plan.memory.num_slots * 7 // 8 if spare else 0
        if slots < max(self.plan.min_slots, least):
            return False
        try:
            self._apply(scheduler, pages, slots)
        except CapacityError:
            return False
        return True

    def _apply(self, scheduler: Scheduler, num_pages: int, num_slots: int) -> None:
        old_pages, old_slots = self._kv.num_units, self.num_slots
        try:
            if num_slots < old_slots:
                self._set_slots(num_slots)
            self._set_pages(scheduler, num_pages)
            if num_slots > old_slots:
                self._set_slots(num_slots)
        except CapacityError as e:
            if self._kv.num_units != old_pages:
                self._set_pages(scheduler, old_pages)
            if self.num_slots != old_slots:
                self._set_slots(old_slots)
            e.hint = e.hint or f"Still serving with {format_bytes(self.budget_bytes)}."
            raise

    def _set_slots(self, num_slots: int) -> None:
        self._experts.resize(num_slots - 1)
        self.num_slots = num_slots

    def _set_pages(self, scheduler: Scheduler, num_pages: int) -> None:
        if num_pages == self._kv.num_units:
            return
        scheduler.shrink_cache(num_pages)
        src, dst = scheduler.pages.plan_shrink(num_pages)
        if src:
            self._kv.relocate(src, dst)
        self._device.synchronize()
        self._kv.resize(num_pages)
        scheduler.moved(scheduler.pages.resize(num_pages, src, dst))

"""FreeToken's model and expert backend over the same weights, without scheduler and server."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.cpu_vs_llamacpp.synthetic import Synthetic
from freetoken.core import choices
from freetoken.core.batch import Segment
from freetoken.core.interfaces import Numerics
from freetoken.core.units import ceil_div
from freetoken.devices.cpu import CpuDevice
from freetoken.engine.runner import Runner
from freetoken.engine.sampler import Sampler
from freetoken.experts import bank as banks
from freetoken.experts.setup import ExpertSetup
from freetoken.models.qwen3_moe import FAMILY
from freetoken.native.library import library

PAGE = 16


class Ours:
    """One sequence on backend cpu."""

    def __init__(self, source: Synthetic, context: int, threads: int, *, int8: bool = False) -> None:
        torch.set_num_threads(threads)
        config, device, numerics = source.model_config, CpuDevice(), Numerics(int8=int8)
        fmt = choices.load("freetoken.quant", source.fmt).FORMAT
        bank = banks.create(config, fmt)
        FAMILY.load_experts(config, source, bank)
        bank.gather(lambda: False)  # as an engine does once its bank is full
        pages = ceil_div(context, PAGE) + 2
        (spec,) = FAMILY.state_specs(config, PAGE, numerics.dtype)
        pool = device.pool("kv", spec.unit_bytes, pages, min_units=2, max_units=pages)
        model = FAMILY.build(config, source, device, numerics, {"kv": pool})
        chunk = max(512, context)
        setup = ExpertSetup(config, bank, device, numerics, threads=threads, chunk_tokens=chunk)
        experts = choices.load("freetoken.experts.backends", "cpu").create(setup)
        self.runner = Runner(model, experts, device, Sampler(2, device.torch_device))
        self.runner.reserve(1, chunk, pages, PAGE)
        self._pages = tuple(range(1, pages))
        self.length = 0
        self.last = torch.empty(0)

    def reset(self) -> None:
        self.length = 0

    def profile(self, clock: Callable[[], float], steps: int = 12) -> dict[str, float]:
        """Median milliseconds of a decode step by operation, what lies between them included."""
        lib, programs = library(), self.runner.programs
        program = programs.program(1) if programs else None
        assert lib is not None and program is not None, "this model's steps aren't recorded"
        whole, parts = [], []
        for _ in range(steps):
            began = clock()
            self.decode([1])
            whole.append(clock() - began)
            sums: dict[str, float] = {}
            for name, seconds in lib.timed(program, clock):
                sums[name] = sums.get(name, 0.0) + seconds
            parts.append(sums)
        found = {name: 1e3 * statistics.median(p[name] for p in parts) for name in parts[0]}
        step = 1e3 * statistics.median(whole)
        return {**found, "between": step - sum(found.values()), "step": step}

    def decode(self, ids: list[int]) -> None:
        """Append ids; logits of the last are ready on return."""
        end = self.length + len(ids)
        pages = self._pages[: ceil_div(end, PAGE)]
        segment = Segment(np.array(ids, np.int32), self.length, pages, 0, 0, is_decode=len(ids) == 1)
        self.last = self.runner.launch([segment]).logits[0]
        self.length = end

"""Small traces for the bench tests."""

from __future__ import annotations

import argparse
import json

import numpy as np

from freetoken.bench import synthetic
from freetoken.bench.traces import DECODE, PREFILL, Trace

SMALL = synthetic.Shape("3x16k2", 3, 16, 2, synthetic.QWEN_LIKE)


def trace_of(steps, num_experts=8, *, phase=None, request=None, step=None):
    """steps: [N][L][k] expert ids."""
    topk = np.array(steps, dtype=np.uint8)
    n = len(topk)
    return Trace(
        topk=topk,
        phase=np.array(phase if phase is not None else [DECODE] * n, dtype=np.uint8),
        request=np.array(request if request is not None else [0] * n, dtype=np.int32),
        step=np.array(step if step is not None else range(n), dtype=np.int32),
        num_experts=num_experts,
        meta={"name": "made"},
    )


def small_trace(seed=0, *, requests=2, prompt=12, answer=30):
    return synthetic.generate(SMALL, seed=seed, requests=requests, prompt_tokens=prompt, answer_tokens=answer)


def without_prefill(trace):
    keep = trace.phase == DECODE
    return Trace(
        trace.topk[keep], trace.phase[keep], trace.request[keep], trace.step[keep], trace.num_experts
    )


def run_bench(bench, *words):
    """Run a bench as the command does; returns its exit code."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args([str(w) for w in words]))


def last_object(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


__all__ = [
    "DECODE",
    "PREFILL",
    "SMALL",
    "last_object",
    "run_bench",
    "small_trace",
    "trace_of",
    "without_prefill",
]

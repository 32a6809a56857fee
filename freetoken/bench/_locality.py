"""How much a trace's routing repeats itself: the statistics that caches live on. Pure arithmetic.

Shares are means over the layers of decode tokens. Tokens of different requests are not compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.bench.traces import DECODE, NO_ROUTING, Trace

WINDOW = 128


def measure(trace: Trace) -> dict[str, float]:
    """Return lag1_share, lag8_share, hottest_share (k hottest in a window), layer0_hottest_share."""
    used = _used(trace)
    hot = _hottest(trace)
    return {
        "lag1_share": _lag_share(trace, used, 1),
        "lag8_share": _lag_share(trace, used, 8),
        "hottest_share": float(hot.mean()),
        "layer0_hottest_share": float(hot[0]),
    }


def _used(trace: Trace) -> NDArray[np.bool_]:
    """bool [N decode, L, E]."""
    topk = trace.topk[trace.phase == DECODE]
    ids = np.where(topk == NO_ROUTING[topk.dtype.itemsize], trace.num_experts, topk.astype(np.int64))
    used = np.zeros((*topk.shape[:2], trace.num_experts + 1), dtype=bool)
    np.put_along_axis(used, ids, True, axis=2)
    return used[:, :, : trace.num_experts]


def _lag_share(trace: Trace, used: NDArray[np.bool_], lag: int) -> float:
    """Share of a token's experts that the same request's token `lag` before it chose, too."""
    if len(used) <= lag:
        return 0.0
    request = trace.request[trace.phase == DECODE]
    same = request[lag:] == request[:-lag]
    now, before = used[lag:][same], used[:-lag][same]
    return float((now & before).sum() / max(1, now.sum()))


def _hottest(trace: Trace) -> NDArray[Any]:
    """float [L]: share of reads that a layer's k hottest experts take, mean over windows of WINDOW tokens."""
    topk = trace.topk[trace.phase == DECODE].astype(np.int64)
    windows = [topk[a : a + WINDOW] for a in range(0, max(1, len(topk) - WINDOW + 1), WINDOW)]
    shares = np.zeros((len(windows), trace.num_layers))
    for i, window in enumerate(windows):
        for layer in range(trace.num_layers):
            ids = window[:, layer].ravel()
            counts = np.sort(np.bincount(ids[ids < trace.num_experts], minlength=1))
            shares[i, layer] = counts[-trace.top_k :].sum() / max(1, counts.sum())
    means: NDArray[Any] = shares.mean(axis=0)
    return means

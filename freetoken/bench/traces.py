"""Routing traces: what a file holds, how it is read, written and recorded while serving.

Owns the .npz format (docs/traces.md) and the two older layouts that it also reads. Doesn't know policies
or slots. A row is one token through all MoE layers; rows stand in the order of time, and consecutive
decode rows with one step number were one batch. A cell without routing holds `NO_ROUTING` of its dtype.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freetoken.core.errors import ConfigError

PREFILL, DECODE = 0, 1
NO_ROUTING = {1: 0xFF, 2: 0xFFFF}
MAX_RECORD_BYTES = 1 << 30


@dataclass(frozen=True)
class Trace:
    """Routing of N tokens.

    topk         uint8 or uint16 [N, L, k]   expert within the layer; NO_ROUTING where there is none
    phase        uint8 [N]                   PREFILL or DECODE
    request      int32 [N]                   whose token
    step         int32 [N]                   engine step; equal in consecutive decode rows = one batch
    num_experts  E, experts of one layer
    """

    topk: NDArray[Any]
    phase: NDArray[np.uint8]
    request: NDArray[np.int32]
    step: NDArray[np.int32]
    num_experts: int
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return int(self.topk.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.topk.shape[2])

    @property
    def pool(self) -> int:
        """Experts of all layers."""
        return self.num_layers * self.num_experts

    @property
    def token_cycle(self) -> int:
        """Experts that one token reads."""
        return self.num_layers * self.top_k

    @property
    def name(self) -> str:
        return str(self.meta.get("name", "trace"))

    @property
    def synthetic(self) -> bool:
        return bool(self.meta.get("synthetic"))

    def engine_steps(self) -> list[tuple[int, slice]]:
        """Return (phase, rows) of each engine step; a request's whole prefill counts as one."""
        same = (self.phase[1:] == self.phase[:-1]) & np.where(
            self.phase[1:] == PREFILL, self.request[1:] == self.request[:-1], self.step[1:] == self.step[:-1]
        )
        edges = [0, *(np.flatnonzero(~same) + 1).tolist(), len(self.phase)]
        return [(int(self.phase[a]), slice(a, b)) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def _bad(path: Path, why: str) -> ConfigError:
    hint = "docs/traces.md describes the format; `ft serve --record-routing FILE` writes it."
    return ConfigError(f"{path} is not a routing trace: {why}.", code="invalid_trace", hint=hint)


def load_trace(path: str | Path) -> Trace:
    """Read a trace file of any known layout; ConfigError `invalid_trace` says what is wrong."""
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise _bad(path, str(error)) from error
    if missing := {"topk", "num_experts"} - set(arrays):
        raise _bad(path, f"the key {sorted(missing)[0]!r} is missing")
    topk = arrays["topk"]
    if topk.ndim != 3 or topk.dtype.kind != "u" or topk.dtype.itemsize > 2:
        raise _bad(path, f"topk is {topk.dtype} {list(topk.shape)}, not uint8 or uint16 [steps, layers, k]")
    if "phase" not in arrays:  # [layers, steps, k], decode only
        topk = np.ascontiguousarray(topk.transpose(1, 0, 2))
    n = topk.shape[0]
    meta = json.loads(str(arrays["meta"])) if "meta" in arrays else {}
    trace = Trace(
        topk=topk,
        phase=arrays.get("phase", np.full(n, DECODE)).astype(np.uint8),
        request=arrays.get("request", np.zeros(n)).astype(np.int32),
        step=arrays.get("step", np.arange(n)).astype(np.int32),
        num_experts=int(arrays["num_experts"]),
        meta={"name": path.stem, **meta},
    )
    _check(path, trace)
    return trace


def _check(path: Path, trace: Trace) -> None:
    n = len(trace.topk)
    for key in ("phase", "request", "step"):
        if getattr(trace, key).shape != (n,):
            raise _bad(path, f"{key} has not one entry per row")
    none = NO_ROUTING[trace.topk.dtype.itemsize]
    used = trace.topk[trace.topk != none]
    if not used.size:
        raise _bad(path, "no row is routed")
    if trace.num_experts > none or int(used.max()) >= trace.num_experts:
        raise _bad(path, f"expert {int(used.max())} of {trace.num_experts}")


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write the documented layout."""
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            topk=trace.topk,
            phase=trace.phase,
            request=trace.request,
            step=trace.step,
            num_experts=np.int64(trace.num_experts),
            meta=np.array(json.dumps(trace.meta, sort_keys=True)),
        )


class RoutingRecorder:
    """Collects routing while an engine serves; a call costs a small copy, rows are joined on `save`.

    The n-th row of a request in one layer is its n-th row in every layer, so layer-major prefill and
    decode steps in between may come in any order. Rows of request -1 (padding) are dropped.
    """

    def __init__(self, num_layers: int, num_experts: int, top_k: int) -> None:
        self.num_layers, self.num_experts, self.top_k = num_layers, num_experts, top_k
        self.full = False
        self._dtype = np.dtype(np.uint8 if num_experts < NO_ROUTING[1] else np.uint16)
        self._calls: list[tuple[int, NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        self._num_bytes = 0

    def record(self, layer: int, ids: ArrayLike, requests: ArrayLike, phases: ArrayLike) -> None:
        """Note one MoE layer's routing.

        ids  int [T, k], -1 = not routed;  requests int [T];  phases [T] or one for all
        """
        if self.full:
            return
        routed = np.asarray(ids).astype(self._dtype)  # -1 becomes NO_ROUTING
        owner = np.array(requests, dtype=np.int32, ndmin=1)
        phase = np.broadcast_to(np.array(phases, dtype=np.uint8), owner.shape)
        self._calls.append((layer, routed, owner, phase))
        self._num_bytes += routed.nbytes + owner.nbytes
        self.full = self._num_bytes >= MAX_RECORD_BYTES

    def drop(self, request: int) -> None:
        """A prefill was dropped on its way: forget the request's rows that haven't met every layer."""
        none = np.empty(0, dtype=np.int32)
        self._calls.append((-1, none, np.array([request], dtype=np.int32), none))

    def trace(self, meta: dict[str, Any] | None = None) -> Trace:
        """Join what was recorded so far; rows that haven't met every layer are left out."""
        rows: dict[int, list[list[NDArray[Any]]]] = {}
        done: list[tuple[int, int, int, int]] = []
        for at, (layer, ids, owner, phase) in enumerate(self._calls):
            if layer < 0:
                self._cut(rows.get(int(owner[0]), []))
                continue
            for row, request in enumerate(owner.tolist()):
                if request < 0:
                    continue
                layers = rows.setdefault(request, [[] for _ in range(self.num_layers)])
                layers[layer].append(ids[row])
                if layer == self.num_layers - 1:
                    done.append((at, request, len(layers[layer]) - 1, int(phase[row])))
        return self._joined(rows, done, meta or {})

    def save(self, path: str | Path, meta: dict[str, Any] | None = None) -> None:
        save_trace(self.trace(meta), path)

    def _cut(self, layers: list[list[NDArray[Any]]]) -> None:
        complete = min((len(rows) for rows in layers), default=0)
        for rows in layers:
            del rows[complete:]

    def _joined(
        self,
        rows: dict[int, list[list[NDArray[Any]]]],
        done: list[tuple[int, int, int, int]],
        meta: dict[str, Any],
    ) -> Trace:
        done = [d for d in done if all(len(layer) > d[2] for layer in rows[d[1]])]
        topk = np.full(
            (len(done), self.num_layers, self.top_k), NO_ROUTING[self._dtype.itemsize], self._dtype
        )
        for i, (_, request, nth, _) in enumerate(done):
            topk[i] = [layer[nth] for layer in rows[request]]
        calls = np.array([d[0] for d in done], dtype=np.int64)
        step = np.unique(calls, return_inverse=True)[1] if done else calls
        return Trace(
            topk=topk,
            phase=np.array([d[3] for d in done], dtype=np.uint8),
            request=np.array([d[1] for d in done], dtype=np.int32),
            step=step.astype(np.int32),
            num_experts=self.num_experts,
            meta=meta,
        )

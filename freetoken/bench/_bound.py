"""The least that agents' prompts allow, from token lists alone: each prompt less its longest known beginning.

Knows nothing of pages, states or engines. A file holds one JSON object a line, in the order of asking:

    {"agent": "openclaw", "prompt": [ids], "answer": [ids]}

    python -m freetoken.bench._bound FILE      prints one JSON object: agent -> tokens asked and bound
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


def common(a: Ids, b: Ids) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def least(prompt: Ids, known: Sequence[Ids]) -> int:
    """Tokens of a prompt that nothing known before can spare; the last one is always computed."""
    return len(prompt) - max((min(common(prompt, k), len(prompt) - 1) for k in known), default=0)


def bounds(rows: Iterable[dict[str, object]]) -> dict[str, dict[str, int]]:
    """Per agent: tokens asked and the bound, the first turn left out, which is cold for everyone."""
    known: dict[str, list[Ids]] = {}
    out: dict[str, dict[str, int]] = {}
    for row in rows:
        agent = str(row["agent"])
        prompt, answer = (np.array(row[name], np.int32) for name in ("prompt", "answer"))
        if agent in known:
            found = out.setdefault(agent, {"asked": 0, "bound": 0})
            found["asked"] += len(prompt)
            found["bound"] += least(prompt, known[agent])
        known.setdefault(agent, []).append(np.concatenate([prompt, answer]))
    return out


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text("utf-8").splitlines()
    print(json.dumps(bounds(json.loads(line) for line in lines)))

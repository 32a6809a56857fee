"""Where a prompt's recurrent state is worth saving. Pure functions on positions (numbers of tokens).

Agents edit whole blocks and keep what stands before them, so a state saved where a block begins or ends
is one that a later prompt can resume from. Knows no token and no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIN_GAP = 4
"""Anchors closer than this are one: the first, which every later edit still can use."""
MAX_GAP = 4096
"""Inside longer blocks a state is saved this often, for edits that no anchor foresees."""


def positions_to_save(anchors: Iterable[int], start: int, end: int, page_size: int) -> list[int]:
    """Choose positions in (start, end), ascending.

    anchors    where blocks begin and end, in any order
    start      tokens already resumed from
    end        length of the prompt; the last anchor before it stands ahead of the template's own tail
    page_size  without an anchor near the end, the last page boundary is taken
    """
    kept: list[int] = []
    last = start
    for position in sorted(p for p in anchors if start < p < end):
        kept += range(last + MAX_GAP, position - MIN_GAP, MAX_GAP)
        if position - last >= MIN_GAP:
            kept.append(position)
            last = position
    kept += range(last + MAX_GAP, end - page_size, MAX_GAP)
    boundary = (end - 1) // page_size * page_size
    if boundary > start and end - 1 - (kept[-1] if kept else start) >= page_size:
        kept.append(boundary)
    return kept


def choose(positions: Sequence[int], start: int, end: int, count: int) -> list[int]:
    """Keep at most `count` of ascending positions between start and end, denser towards both.

    Edits come near the end (the newest turns) or right behind the last edit (a window that moves by a
    block a turn), which is where this prompt left the known path. Drops again and again the one whose
    loss costs least: tokens back to the one before, by the distance from the nearer end.
    """
    kept = list(positions)
    while len(kept) > max(count, 0):
        if len(kept) == 1:
            return []
        before = [start, *kept]
        worth = [(p - before[i]) / min(end - p + 1, p - start + 1) for i, p in enumerate(kept[:-1])]
        del kept[worth.index(min(worth))]
    return kept

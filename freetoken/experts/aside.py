"""A stream beside the main one: it forks from what the main stream was given, and is joined once it did.

A captured step refuses to wait for work that it doesn't hold, so nothing is joined that has not forked
since. Without a device that has streams everything is launched in place. What is launched aside may read
tensors of the main stream: they are kept until the join, for their memory is the main stream's to reuse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch


class Aside:
    """side   the other stream, None to launch in place; current: the main one; enter: makes `side` current"""

    def __init__(
        self,
        side: Any | None,
        current: Callable[[], Any] = torch.cuda.current_stream,
        enter: Callable[[Any], contextlib.AbstractContextManager[Any]] = torch.cuda.stream,
    ) -> None:
        self._side, self._current, self._enter = side, current, enter
        self._kept: list[object] = []
        self._forked = False

    @contextlib.contextmanager
    def launch(self, *, after: bool = True) -> Generator[None]:
        """Launch aside. after: not before all that the main stream has been given so far; the first is."""
        if self._side is None:
            yield
            return
        if after or not self._forked:
            self._side.wait_stream(self._current())
        self._forked = True
        with self._enter(self._side):
            yield

    def keep(self, *things: object) -> None:
        """Until the next join: tensors that what runs aside reads."""
        self._kept += things

    def join(self) -> None:
        """What was launched aside is over for whatever the main stream is given next."""
        if self._side is not None and self._forked:
            self._current().wait_stream(self._side)
        self._forked = False
        self._kept.clear()

"""Interpreted kernels patch Triton's language once a launch.

The interpreter does so at each call of a device function too, tl.sum among them, which takes longer than what
most of them compute; inside a launch it changes nothing that the launch's own patches have not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from freetoken.kernels._triton import INTERPRETED, tl


def once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """patch(function) -> scope, whose restore() ends a launch. Patched are modules that a function sees."""
    patched: set[Any] = set()
    known: dict[Any, set[Any]] = {}

    def patch_lang(function: Any) -> Any:
        if function not in known:
            known[function] = {m for m in (tl, tl.core) if any(m is v for v in function.__globals__.values())}
        if patched and known[function] <= patched:
            return None
        scope = patch(function)
        patched.update(known[function])
        restore = scope.restore

        def end() -> None:
            patched.clear()
            restore()

        scope.restore = end
        return scope

    return patch_lang


if INTERPRETED:
    from triton.runtime import interpreter

    interpreter._patch_lang = once_a_launch(interpreter._patch_lang)

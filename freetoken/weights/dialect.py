"""What a dialect is: how one publisher's tool stores coded matrices under several tensor names.

Owns the tables' types and the source that shows a module's codes and scales as one matrix under the
name its plain form would have. Doesn't know formats but by name, nor models. Invariant: opening lists
every missing, stray or unreadable tensor at once, from headers alone; codes are never expanded.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.weights import CodedMatrix, Fetched, Lies, Stored, WeightSource
from freetoken.weights.names import canonical

Shapes = Mapping[str, tuple[int, ...]]
Raw = Mapping[str, Any]
_SHOWN = 12


class Unreadable(Exception):
    """A module that a scheme knows and can't read; the text says why."""


class Missing(Unreadable):
    """A module lacks a tensor that the checkpoint's settings ask for; the text is its role."""


@dataclass(frozen=True)
class Form:
    """What a module turns out to be: the weight format's name, and the matrix's own shape [.., rows, K]."""

    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Scheme:
    """One way of storing a matrix. Roles are endings of tensor names, separator included.

    needs    roles that must be there, with the types they may have; the first one is the codes'
    form     (shapes by role, the checkpoint's quantisation config) -> Form; else Missing or Unreadable
    codes    (tensors by role, config) -> the matrix in its format's own codes
    may      roles that are read if they are there
    groups   of these, the one that names each column's group: columns are sorted by it (act-order)
    ignores  roles that a weight doesn't depend on, as scales of activations
    refuses  role -> why a module with it can't be read
    lies     (config) -> of what role a tensor is: `codes` does nothing else to those
    plain    ending of the name that the matrix has when it is not coded
    """

    needs: Mapping[str, tuple[torch.dtype, ...]]
    form: Callable[[Shapes, Raw], Form]
    codes: Callable[[Mapping[str, Tensor], Raw], CodedMatrix]
    may: tuple[str, ...] = ()
    groups: str = ""
    ignores: tuple[str, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)
    lies: Callable[[Raw], Mapping[str, Lies]] = lambda raw: {}
    plain: str = ".weight"

    @functools.cached_property
    def anchor(self) -> str:
        return next(iter(self.needs))

    @functools.cached_property
    def read(self) -> tuple[str, ...]:
        """What a weight is made of."""
        return (*self.needs, *self.may)

    @functools.cached_property
    def roles(self) -> tuple[str, ...]:
        """All that belongs to a module of this scheme."""
        return (*self.read, *self.ignores, *self.refuses)


@dataclass(frozen=True)
class Dialect:
    """A publisher's tool. One file of `dialects/` each.

    methods   what `quant_method` says in the checkpoint's config
    ignored   endings of tensors that nothing here depends on, whatever module they belong to
    check     (config) -> Unreadable for settings that no scheme covers
    """

    methods: tuple[str, ...]
    schemes: tuple[Scheme, ...]
    ignored: tuple[str, ...] = ()
    check: Callable[[Raw], None] = lambda raw: None


class _Module(NamedTuple):
    """base: what its tensors' names share; roles: those that are read."""

    scheme: Scheme
    base: str
    roles: tuple[str, ...]
    form: Form

    @property
    def stored(self) -> dict[str, str]:
        """Names of the tensors by role."""
        return {role: self.base + role for role in self.roles}


class DialectSource(WeightSource):
    """A checkpoint's tensors with every coded module as one matrix under its plain name."""

    def __init__(self, source: WeightSource, dialect: Dialect, raw: Raw) -> None:
        self._source, self._raw = source, raw
        self._modules: dict[str, _Module] = {}
        # Tens of thousands of modules have a handful of shapes: each is judged once.
        self._forms: dict[tuple[Any, ...], Form | Unreadable] = {}
        self._lies = {id(scheme): scheme.lies(raw) for scheme in dialect.schemes}
        try:
            dialect.check(raw)
        except Unreadable as why:
            raise _unsupported([str(why)]) from why
        skipped = {name for name in source.names() if canonical(name) is None}
        names = {n for n in source.names() if not n.endswith(dialect.ignored)} - skipped
        anchors = tuple(scheme.anchor for scheme in dialect.schemes)
        marks = {
            id(scheme): [role for role in scheme.roles if not role.endswith(dialect.ignored)]
            for scheme in dialect.schemes
        }
        used: set[str] = set()
        missing: list[str] = []
        refused: list[str] = []
        for name in sorted(name for name in names if name.endswith(anchors)):
            scheme = self._scheme_of(dialect, name, names)
            if scheme is not None:
                base = name[: -len(scheme.anchor)]
                used.update([base + role for role in marks[id(scheme)]])
                self._add(scheme, base, names, (missing, refused))
        scales = tuple({role for scheme in dialect.schemes for role in scheme.needs if role != scheme.plain})
        stray = sorted(name for name in names - used if name.endswith(scales))
        _report(missing, stray, refused)
        self._plain = (names - used) | skipped

    def _scheme_of(self, dialect: Dialect, name: str, names: set[str]) -> Scheme | None:
        """The scheme whose codes `name` are: one that has all it needs before one that lacks something."""
        partly = None
        for scheme in dialect.schemes:
            if not name.endswith(scheme.anchor):
                continue
            base, lacks = name[: -len(scheme.anchor)], False
            for role, types in scheme.needs.items():
                if base + role not in names:
                    lacks = True
                elif self._source.dtype(base + role) not in types:
                    break
            else:
                if not lacks:
                    return scheme
                partly = partly or scheme
        return partly

    def _add(self, scheme: Scheme, base: str, names: set[str], faults: tuple[list[str], list[str]]) -> None:
        missing, refused = faults
        roles = tuple([role for role in scheme.read if base + role in names])
        lacks = [base + role for role in scheme.needs if role not in roles]
        missing += lacks
        refused += [f"{base}{role}: {why}" for role, why in scheme.refuses.items() if base + role in names]
        if lacks:
            return
        form = self._form(scheme, roles, [self._source.shape(base + role) for role in roles])
        if isinstance(form, Form):
            self._modules[base + scheme.plain] = _Module(scheme, base, roles, form)
        elif isinstance(form, Missing):
            missing.append(f"{base}{form}")
        else:
            refused.append(f"{base}{scheme.anchor}: {form}")

    def _form(
        self, scheme: Scheme, roles: tuple[str, ...], shapes: list[tuple[int, ...]]
    ) -> Form | Unreadable:
        """What a module with these tensors is, or why it can't be read."""
        key = (id(scheme), roles, *shapes)
        found = self._forms.get(key)
        if found is None:
            try:
                found = scheme.form(dict(zip(roles, shapes, strict=True)), self._raw)
            except Unreadable as why:
                found = why
            except (ValueError, IndexError):  # an axis that every such matrix has is not there
                found = Unreadable(f"its tensors have the shapes {', '.join(str(list(s)) for s in shapes)}")
            self._forms[key] = found
        return found

    def counts(self) -> dict[str, int]:
        """How many matrices each format codes."""
        return Counter(module.form.format for module in self._modules.values())

    def names(self) -> Iterable[str]:
        return [*self._plain, *self._modules]

    def shape(self, name: str) -> tuple[int, ...]:
        module = self._modules.get(name)
        return module.form.shape if module else self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Of a coded matrix, the type of its decoded numbers."""
        return torch.float32 if name in self._modules else self._source.dtype(name)

    def read(self, name: str) -> Tensor:
        return self._source.read(name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._source.read_rows(name, start, stop)

    def coding(self, name: str) -> str:
        module = self._modules.get(name)
        return module.form.format if module else self._source.coding(name)

    def read_coded(self, name: str, index: int | None = None) -> CodedMatrix:
        module = self._modules.get(name)
        if module is None:
            return self._source.read_coded(name, index)
        stored = module.stored.items()
        if index is None:
            tensors = {role: self._source.read(stored_name) for role, stored_name in stored}
        else:
            tensors = {role: self._source.read_rows(n, index, index + 1)[0] for role, n in stored}
        try:
            return module.scheme.codes(tensors, self._raw)
        except Unreadable as why:
            raise _unsupported([f"{name}: {why}"]) from why

    def stored(self, name: str, index: int | None = None) -> tuple[Stored, ...]:
        module = self._modules.get(name)
        if module is None:
            return self._source.stored(name, index)
        found, lies = [], self._lies[id(module.scheme)]
        for role in module.roles:
            lying = self._source.stored(module.base + role, index)
            if len(lying) != 1 or role not in lies:
                return ()
            found.append(Stored(lies[role], *lying[0][1:]))
        return tuple(found)

    def fetch(self, some: Sequence[Stored]) -> Fetched | None:
        return self._source.fetch(some)

    def columns(self, name: str) -> Tensor | None:
        module = self._modules.get(name)
        if module is None:
            return self._source.columns(name)
        stored = module.stored.get(module.scheme.groups)
        return None if stored is None else order_of(self._source.read(stored))

    def stored_bytes(self, name: str) -> int:
        module = self._modules.get(name)
        stored = module.stored.values() if module else [name]
        return sum(self._source.stored_bytes(n) for n in stored)

    def close(self) -> None:
        self._source.close()


def order_of(groups: Tensor) -> Tensor | None:
    """int64 [K]: columns sorted by their group, None if they lie so already."""
    return None if bool((groups.diff() >= 0).all()) else torch.argsort(groups, stable=True)


def _report(missing: list[str], stray: list[str], refused: list[str]) -> None:
    """One error for everything that a module lacks, has too much of, or can't be read by."""
    if missing or stray:
        parts = [("missing", missing), ("scale nothing, their codes are missing or of another type", stray)]
        raise WeightsError(
            "Coded weights are incomplete. "
            + ". ".join(f"{len(names)} tensors {what}: {_list(names)}" for what, names in parts if names)
            + ".",
            code="missing_tensor",
            hint="Download the checkpoint again, or use another quantisation of this model.",
        )
    if refused:
        raise _unsupported(refused)


def _unsupported(faults: list[str]) -> WeightsError:
    return WeightsError(
        f"This checkpoint's quantisation can't be read: {_list(faults, '; ')}.",
        code="unsupported_quantization",
        hint="Use another quantisation of this model: docs/quantised-checkpoints.md lists what is read.",
    )


def _list(texts: list[str], by: str = ", ") -> str:
    more = f"{by}and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return by.join(texts[:_SHOWN]) + more

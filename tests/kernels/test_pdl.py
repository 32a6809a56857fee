"""Programmatic dependent launch: kernels that start early read nothing too early, on any card."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import freetoken.kernels

pytest.importorskip("triton")
from freetoken.kernels._triton import Card, Launch
from freetoken.kernels.expert_step import triton as step
from freetoken.kernels.norm_linear import triton as norm_linear
from freetoken.kernels.router import triton as router

from .ahead import compile_for

ROOT = Path(freetoken.kernels.__file__).parent
WRITES = {"store", "atomic_add", "atomic_xchg", "atomic_cas", "inline_asm_elementwise"}
CONSTANT = {"weight", "norm", "at", "asked"}
"""What may be read early: names of pointers to what no kernel writes, or to places in it."""
OLDER = {"combine": {"ids", "weights", "here"}, "split_attention": {"context"}}
"""And what was there before the kernel before passed its own wait, behind which alone it lets others in."""


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions with a constant PDL that aren't the rule's own."""
    for path in sorted(ROOT.rglob("*.py")):
        if path.name == "_pdl.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "PDL" in {a.arg for a in node.args.args}:
                yield f"{path.relative_to(ROOT)}:{node.name}", node


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    found = (n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    return [n for n in found if n.func.attr == name]


def wait_of(kernel: ast.FunctionDef) -> int:
    """Where every block passes: the number of the statement, on the kernel's first level."""
    places = [i for i, s in enumerate(kernel.body) if isinstance(s, ast.Expr) and calls(s, "await_previous")]
    assert len(places) == 1, "every block waits once, whatever it has to do"
    return places[0]


def pointer(address: ast.expr) -> str:
    """The name that an address is counted from: its first term."""
    while isinstance(address, ast.BinOp):
        address = address.left
    assert isinstance(address, ast.Name)
    return address.id


KERNELS = dict(kernels())


def test_kernels_that_start_early_are_found() -> None:
    assert len(KERNELS) >= 15


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_written_and_only_weights_are_read_before_the_wait(name: str) -> None:
    kernel = KERNELS[name]
    for statement in kernel.body[: wait_of(kernel)]:
        assert not any(calls(statement, write) for write in WRITES)
        assert not any(isinstance(n, ast.Return) for n in ast.walk(statement)), (
            "a block that left never waits"
        )
        for load in calls(statement, "load"):
            base = pointer(load.args[0])
            assert base in CONSTANT | OLDER.get(kernel.name, set()), f"{base} may not be there yet"


def test_who_waits_for_the_host_lets_nobody_in() -> None:
    """Waiting blocks would fill the card while a prefetch beside the stream wants to start."""
    assert not calls(KERNELS["expert_step/_tiles.py:wait"], "let_next_start")


def launches(card: Card) -> list[Launch]:
    found = [next(iter(maker.specimens(torch.bfloat16)))(card) for maker in (router, norm_linear, step)]
    return [launch for group in found for launch in group if "PDL" in launch.consts]


@pytest.mark.parametrize(("arch", "early"), [(89, False), (90, True), (120, True)])
def test_cards_that_lack_it_get_no_instruction_of_it(arch: int, early: bool) -> None:
    some = launches(Card(arch, 100))
    assert len(some) >= 6
    for launch in some:
        assert ("griddepcontrol.wait" in compile_for(launch, Card(arch, 100)).ptx) is early

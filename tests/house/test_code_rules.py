"""How code is written: sizes, state, environment, names, docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from house_source import PACKAGE, ROOT, Source, report, sources

Function = ast.FunctionDef | ast.AsyncFunctionDef

FILE_LINES, KERNEL_LINES = 500, 700
FUNCTION_LINES, ARGUMENTS = 60, 6
NATIVE = ("*.cpp", "*.h", "*.cu")
# Axes whose choices' names nobody else compares, and the files that own several of them.
AXES = ("models", "quant", "attention", "chat/parsers")
NAME_TABLES = ("core/cost.py",)
MUTATORS = ("append", "add", "update", "setdefault", "pop", "clear", "extend", "remove", "insert", "popitem")


def functions(source: Source) -> Iterator[Function]:
    return (n for n in source.walk() if isinstance(n, Function))


def test_files_stay_below_the_wall() -> None:
    breaches = []
    for source in sources():
        limit = KERNEL_LINES if source.is_kernel else FILE_LINES
        lines = source.text.count("\n")
        if lines > limit:
            breaches.append(f"freetoken/{source.name}: {lines} lines > {limit}")
    for pattern in NATIVE:
        for path in PACKAGE.rglob(pattern):
            lines = path.read_text("utf-8").count("\n")
            if lines > KERNEL_LINES:
                breaches.append(f"{path.relative_to(ROOT)}: {lines} lines > {KERNEL_LINES}")
    for path in (ROOT / "tests").rglob("*.py"):
        lines = path.read_text("utf-8").count("\n")
        if lines > FILE_LINES:
            breaches.append(f"{path.relative_to(ROOT)}: {lines} lines > {FILE_LINES}")
    assert not breaches, report(breaches)


def test_functions_fit_on_a_screen() -> None:
    breaches = []
    for source in sources():
        if source.is_kernel:
            continue
        for f in functions(source):
            lines = (f.end_lineno or f.lineno) - f.lineno + 1 - _docstring_lines(f)
            if lines >= FUNCTION_LINES:
                breaches.append(f"{source.at(f)} {f.name}: {lines} lines")
    assert not breaches, report(breaches)


def _docstring_lines(f: Function) -> int:
    first = f.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return (first.end_lineno or first.lineno) - first.lineno + 1
    return 0


def test_functions_take_few_arguments() -> None:
    breaches = []
    for source in sources():
        if source.is_kernel:
            continue
        for f in functions(source):
            names = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
            count = len([n for n in names if n not in ("self", "cls")])
            if count > ARGUMENTS:
                breaches.append(f"{source.at(f)} {f.name}: {count} arguments")
    assert not breaches, report(breaches)


def test_every_file_says_what_it_owns() -> None:
    breaches = [f"freetoken/{s.name}" for s in sources() if s.text.strip() and not ast.get_docstring(s.tree)]
    assert not breaches, "no module docstring:" + report(breaches)


def test_the_environment_is_read_in_one_file() -> None:
    breaches = []
    for source in sources():
        if source.name == "core/env.py":
            continue
        for node in source.walk():
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if name in ("environ", "getenv", "putenv", "environb") and _is_os(node):
                breaches.append(source.at(node))
        breaches += [source.at(n) for n, name in source.imports() if name in ("os.environ", "os.getenv")]
    assert not breaches, "read it in core/env.py:" + report(breaches)


def _is_os(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"


def test_nobody_probes_with_hasattr() -> None:
    breaches = [
        source.at(node)
        for source in sources()
        for node in source.walk()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"
    ]
    assert not breaches, "give the interface a default:" + report(breaches)


def test_modules_hold_constants_and_loggers_only() -> None:
    breaches = []
    for source in sources():
        for node in source.tree.body:
            for name in _assigned(node):
                if not _may_stand(name, node):
                    breaches.append(f"{source.at(node)} {name}")
    assert not breaches, "state belongs to an object:" + report(breaches)


def _assigned(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        found = [n for target in node.targets for n in ast.walk(target)]
    elif isinstance(node, ast.AnnAssign):
        found = [node.target]
    else:
        return []
    return [n.id for n in found if isinstance(n, ast.Name)]


def _may_stand(name: str, node: ast.stmt) -> bool:
    bare = name.lstrip("_")
    if bare.isupper() or name.startswith("__"):
        return True
    if bare[:1].isupper() and bare.isidentifier():  # a type alias
        return True
    value = getattr(node, "value", None)
    called = value.func if isinstance(value, ast.Call) else None
    return getattr(called, "id", getattr(called, "attr", "")) in ("logger", "getLogger")


def test_functions_leave_module_constants_alone() -> None:
    breaches = []
    for source in sources():
        constants = {n for node in source.tree.body for n in _assigned(node)}
        for node in source.walk():
            if isinstance(node, ast.Global):
                breaches.append(f"{source.at(node)} global {', '.join(node.names)}")
        for f in functions(source):
            breaches += [f"{source.at(n)} changes {name}" for n, name in _mutations(f) if name in constants]
    assert not breaches, report(breaches)


def _mutations(f: Function) -> Iterator[tuple[ast.AST, str]]:
    local = {n.id for n in ast.walk(f) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local |= {a.arg for a in ast.walk(f) if isinstance(a, ast.arg)}
    for node in ast.walk(f):
        name = ""
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            name = getattr(node.value, "id", "")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = getattr(node.func.value, "id", "") if node.func.attr in MUTATORS else ""
        if name and name not in local:
            yield node, name


def test_names_of_choices_are_compared_in_their_own_file_only() -> None:
    owners: dict[str, set[str]] = {}
    for axis in AXES:
        for path in (PACKAGE / axis).glob("[a-z]*.py"):
            owners.setdefault(path.stem, set()).add(path.relative_to(PACKAGE).as_posix())
    breaches = []
    for source in sources():
        if source.name in NAME_TABLES:
            continue
        for node in source.walk():
            for text in _compared(node):
                if text in owners and source.name not in owners[text]:
                    breaches.append(f"{source.at(node)} compares with {text!r}")
    assert not breaches, report(breaches)


def _compared(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Compare):
        parts: list[ast.AST] = [node.left, *node.comparators]
    elif isinstance(node, ast.MatchValue):
        parts = [node.value]
    else:
        return []
    leaves = [leaf for part in parts for leaf in _leaves(part)]
    return [leaf.value for leaf in leaves if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)]


def _leaves(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return list(node.elts)
    return [node]

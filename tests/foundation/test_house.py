"""The house: how large rooms, modules and functions may be, that no import hides, and that no rooms are in a circle.

`make imports` finds circles of modules and of rooms side by side; here a room and one inside it count, too.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("kvfs", "tiers", "gateway", "mounts", "scheduler")
MOST_MODULES: Final = 14
"""In a folder."""
MOST_LINES: Final = 600
MOST_FUNCTION_LINES: Final = 50
LOADS_BY_NAME: Final = {"kvfs/cli/lazy.py"}
BEGINS_TRANSACTIONS: Final = {"kvfs/index/environment.py", "tiers/recovery/index_check.py"}
"""Modules that begin transactions of LMDB, and free their slots; all others read through them."""
PARALLEL: Final = {"__init__", "tier", "large"}
"""File names of rooms that have the same parts."""


class Import(NamedTuple):
    """A statement that imports modules or names in them."""

    line: int
    names: list[str]
    is_on_top: bool


class Facts(NamedTuple):
    """What the tests ask of a module; its tree, which is large, is not kept."""

    functions: dict[str, int]
    """Place -> lines."""
    imports: list[Import]
    begins_transactions: bool


@cache
def modules() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


@cache
def facts(path: Path) -> Facts:
    """Parse a module, once for all tests."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    functions: dict[str, int] = {}
    imports: list[Import] = []
    transactions = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            functions[where] = (node.end_lineno or 0) - node.lineno + 1
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(Import(node.lineno, imported_by(node), id(node) in top))
        elif isinstance(node, ast.Call):
            transactions += begins_transaction(node)
    return Facts(functions, imports, transactions > 0)


def test_rooms_and_modules_are_small() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in modules() if path.name != "__init__.py"}
    crowded = {
        str(room): count
        for room, count in Counter(path.parent for path in sizes).items()
        if count > MOST_MODULES
    }
    assert crowded == {}
    assert {str(path): size for path, size in sizes.items() if size > MOST_LINES} == {}
    ordered = sorted(sizes.values())
    assert ordered[len(ordered) // 2] <= 170
    assert ordered[len(ordered) * 9 // 10] <= 350


def test_functions_are_short() -> None:
    lines = {where: count for path in modules() for where, count in facts(path).functions.items()}
    assert {where: count for where, count in lines.items() if count > MOST_FUNCTION_LINES} == {}
    assert sorted(lines.values())[len(lines) * 9 // 10] <= 18


def test_a_file_name_occurs_once_in_a_package_except_in_parallel_rooms() -> None:
    for package in PACKAGES:
        names = Counter(path.stem for path in (ROOT / package).rglob("*.py"))
        assert {name for name, count in names.items() if count > 1} - PARALLEL == set(), package


def test_a_name_of_a_test_file_occurs_once() -> None:
    """Else pytest takes one for the other where folders are no packages."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_import_hides_in_a_function_or_behind_type_checking() -> None:
    hidden = []
    for path in modules():
        if "connectors" in path.parts or str(path.relative_to(ROOT)) in LOADS_BY_NAME:
            continue  # connectors import what their engine has
        hidden += [
            f"{path.relative_to(ROOT)}:{each.line}"
            for each in facts(path).imports
            if not each.is_on_top and any(map(is_own, each.names))
        ]
    assert hidden == []


def test_transactions_of_lmdb_begin_where_their_slots_are_freed() -> None:
    """An environment is called `env`; `write=` and `buffers=` are arguments of its `begin`, and of no other here."""
    found = {str(path.relative_to(ROOT)) for path in modules() if facts(path).begins_transactions}
    assert found == BEGINS_TRANSACTIONS


def begins_transaction(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = ast.unparse(call.func.value).rpartition(".")[2].lower()
    named = {argument.arg for argument in call.keywords}
    is_begin = call.func.attr == "begin" and ("env" in owner or bool(named & {"write", "buffers", "parent"}))
    return is_begin or ast.unparse(call.func) == "lmdb.Transaction"


def test_no_rooms_are_in_a_circle() -> None:
    rooms: TopologicalSorter[str] = TopologicalSorter()
    for path in modules():
        if path.name != "__init__.py":
            rooms.add(room_of(path), *(room for room in rooms_imported(path) if room != room_of(path)))
    rooms.prepare()  # raises CycleError, which names them


def rooms_imported(path: Path) -> Iterator[str]:
    """Yield the room of each module that a module imports from."""
    for name in (name for each in facts(path).imports for name in filter(is_own, each.names)):
        module = ROOT / name.replace(".", "/")
        found = next((at for at in (module, module.parent) if at.with_suffix(".py").exists()), None)
        if found is not None:
            yield room_of(found)


def imported_by(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the dotted names of what a statement imports, modules or names in them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module or ''}.{alias.name}" for alias in node.names]


def room_of(module: Path) -> str:
    """Return the folder of a module; a module beside a package's rooms is a room of its own."""
    path = module.relative_to(ROOT).with_suffix("")
    return str(path if len(path.parts) == 2 else path.parent)


def is_own(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES

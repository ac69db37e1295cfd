"""Docstrings: each public class, function and method says what it does, a function with a verb first.

A method needs none where a base has it: one of another library, which documents it, or one of ours whose method has a
docstring; a class that says "Implements `Protocol`" counts as based on that. Setters and overloads have their getter's
and their function's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("kvfs", "tiers", "gateway", "mounts", "scheduler")
PLAIN: Final = {
    "Protocol",
    "NamedTuple",
    "TypedDict",
    "Generic",
    "Enum",
    "IntEnum",
    "StrEnum",
    "IntFlag",
    "Struct",
}
"""Bases that document nothing of what a class adds."""
PLAIN_MODULES: Final = {"builtins", "abc", "pydantic"}
NO_VERBS: Final = re.compile(
    r"(An?|All|And|Any|As|At|Both|But|By|Each|Every|For|From|How|If|In|Is|It|Its|No|Not|Of|On|One|Only|Or|Some|That|The"
    r"|Their|These|They|This|Those|To|Under|Unless|Until|What|When|Where|Whether|Which|While|Who|Whose|With|Without"
    r"|[A-Z][a-z]*[^s\W]s)\b"
)
"""What no docstring of a function begins with; third persons (Returns) neither."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A public class, function or method, with the class around it."""

    where: str
    node: ast.ClassDef | Function
    inside: ast.ClassDef | None


class Module:
    """One module: its classes, and what its names stand for."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(ROOT)
        self.tree = ast.parse(path.read_text())
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self.imported: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                names = {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
                self.imported.update(names)

    def definitions(self) -> Iterator[Definition]:
        """Yield what is public in the module, in its order."""
        yield from self._public(self.tree.body, None)

    def _public(self, body: list[ast.stmt], inside: ast.ClassDef | None) -> Iterator[Definition]:
        for node in body:
            if isinstance(node, ast.If | ast.Try):
                yield from self._public(node.body, inside)
            elif isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
                name = f"{inside.name}.{node.name}" if inside else node.name
                yield Definition(f"{self.path}:{node.lineno} {name}", node, inside)
                if isinstance(node, ast.ClassDef):
                    yield from self._public(node.body, node)


@cache
def modules() -> dict[str, Module]:
    """Return all modules by their dotted names."""
    found = [Module(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(each.path.with_suffix("").parts).removesuffix(".__init__"): each for each in found}


def bases(module: str, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each base of a class, and of each protocol that it says it implements."""
    for each in node.bases:
        name = ast.unparse(each.value if isinstance(each, ast.Subscript) else each)
        head, _, tail = name.rpartition(".")
        yield (
            (".".join(modules()[module].imported.get(head, (head,))), tail) if head else home_of(module, name)
        )
    for said in re.findall(r"Implements? (`[^.:;]+)", ast.get_docstring(node) or ""):
        for name in re.findall(r"`(\w+)`", said):
            yield from ((home, name) for home, each in modules().items() if name in each.classes)


def home_of(module: str, name: str) -> tuple[str, str]:
    """Return (module, name) of a class that a module knows by this name."""
    if name in modules()[module].classes:
        return module, name
    return modules()[module].imported.get(name, ("builtins", name))


def is_documented_by_base(module: str, node: ast.ClassDef, method: str) -> bool:
    """Return whether a base of a class has the documentation of this method, or may have: it is another library's."""
    for home, name in bases(module, node):
        if home not in modules():
            if name not in PLAIN and home.partition(".")[0] not in PLAIN_MODULES:
                return True
        elif (base := modules()[home].classes.get(name)) is not None and base is not node:
            own = [each for each in base.body if isinstance(each, Function) and each.name == method]
            if any(map(ast.get_docstring, own)) or is_documented_by_base(home, base, method):
                return True
    return False


def needs_none(module: str, each: Definition) -> bool:
    """Return whether another definition has the docstring of this one."""
    marks = [ast.unparse(mark).rpartition(".")[2] for mark in each.node.decorator_list]
    if "setter" in marks or "overload" in marks:
        return True
    if isinstance(each.node, ast.ClassDef) or each.inside is None:
        return False
    return is_documented_by_base(module, each.inside, each.node.name)


def is_plain(node: ast.ClassDef | Function) -> bool:
    """Return whether a definition's docstring begins as it should, and its first paragraph is whole sentences."""
    paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
    if not paragraph.endswith((".", ":")) or paragraph.startswith("Whether "):
        return False
    return isinstance(node, ast.ClassDef) or NO_VERBS.match(paragraph) is None


def test_public_definitions_have_a_docstring() -> None:
    missing = [
        each.where
        for name, module in modules().items()
        for each in module.definitions()
        if not ast.get_docstring(each.node) and not needs_none(name, each)
    ]
    assert missing == []


def test_a_docstring_begins_with_a_verb_and_is_whole_sentences() -> None:
    written = [each for module in modules().values() for each in module.definitions()]
    assert [each.where for each in written if ast.get_docstring(each.node) and not is_plain(each.node)] == []

"""What pages, comments and docstrings name is there: modules, rooms, files, and what they say is in a module."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from typing import Final

import pytest

from tests.support.pages import PAGES
from tests.support.service import ROOT

PACKAGES: Final = ("kvfs", "tiers", "mounts", "gateway", "scheduler")
CODE: Final = (*PACKAGES, "tests", "bench")
MODULE: Final = re.compile(rf"(?<![\w./\"'@-])(?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+(?![\w/])")
FILE: Final = re.compile(rf"(?<![\w./@-])(?:{'|'.join(CODE)}|docs|packaging)/[\w./-]*\w(?![\w{{*<])")
NO_MODULES: Final = {
    "kvfs.sock",
    "kvfs.toml",
    "kvfs.last_block",
    "kvfs.namespace",
    "kvfs.source",
    "tiers.NAME",
}
"""Files, and fields of a transfer's parameters, of such a form."""
STATUS_KEYS: Final = ROOT / "docs" / "metrics.md"
"""Its first column has keys of the service's status, in form like names of modules; a test of its own compares them."""


def test_what_pages_name_is_there() -> None:
    for page in PAGES:
        text = page.read_text()
        assert missing(FILE, text) == [], page
        if page != STATUS_KEYS:
            assert missing(MODULE, text) == [], page


@pytest.mark.parametrize("package", CODE)
def test_what_comments_and_docstrings_name_is_there(package: str) -> None:
    wrong = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        if names := missing_in_prose(path.read_text()):
            wrong[str(path.relative_to(ROOT))] = names
    assert wrong == {}


def test_a_name_in_prose_alone_is_missed() -> None:
    source = (
        '"""tiers.drum"""\nx = "tiers.dram.drum"  # kvfs.nothing and tiers.dram\n"""kvfs/limits/none.py"""\n'
    )
    assert missing_in_prose(source) == ["kvfs.nothing", "tiers.drum", "kvfs/limits/none.py"]


def missing_in_prose(source: str) -> list[str]:
    """Find what comments and docstrings name and the checkout has not."""
    bare = source.replace("\\n", " ").replace('"', " ").replace("'", " ")
    if not missing(MODULE, bare) + missing(FILE, bare):  # not in code either, which takes a tenth of the time
        return []
    text = "\n".join(prose(source))
    return missing(MODULE, text) + missing(FILE, text)


@pytest.mark.parametrize(
    "name",
    [
        "tiers.dram",
        "tiers.dram.tier",
        "kvfs.errors.from_errno",
        "kvfs.client.client.Client.put",
        "kvfs/limits",
    ],
)
def test_a_name_that_is_there_is_found(name: str) -> None:
    assert missing(MODULE, name) + missing(FILE, name) == []


@pytest.mark.parametrize(
    "name",
    [
        "tiers.drum",
        "tiers.dram.tears",
        "kvfs.errors.from_nothing",
        "kvfs/limits/none.py",
        "tests/test_76_none.py",
    ],
)
def test_a_name_that_is_not_there_is_missed(name: str) -> None:
    assert missing(MODULE, name) + missing(FILE, name) == [name]


def missing(pattern: re.Pattern[str], text: str) -> list[str]:
    """Find what `text` names by `pattern` and the checkout has not."""
    is_there = module_is_there if pattern is MODULE else file_is_there
    return [name for name in pattern.findall(text) if not is_there(name)]


@cache
def file_is_there(name: str) -> bool:
    return (ROOT / name).exists()


@cache
def module_is_there(name: str) -> bool:
    """Say whether a dotted name is a room, a module, or a word that stands in the module it begins with."""
    if name in NO_MODULES:
        return True
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        stem = ROOT.joinpath(*parts[:count])
        sources = [
            path for path in (*stem.parent.glob(stem.name + ".py*"), stem / "__init__.py") if path.is_file()
        ]
        if sources or stem.is_dir():
            return count == len(parts) or any(
                re.search(rf"\b{parts[count]}\b", source.read_text()) for source in sources
            )
    return False


def prose(source: str) -> Iterator[str]:
    """Yield the comments and docstrings of a module, those of constants and fields included."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value

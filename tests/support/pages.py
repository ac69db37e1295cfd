"""The pages of the documentation as blocks of code.

A block is fenced, and its language says what a test does with it:

- `sh` is run by bash, `python` by Python, in order, on a real service whose mount takes the place of /mnt/kvfs,
  as a directory of the test does that of /etc/kvfs;
- `toml` is loaded as kvfs's configuration, `json` is parsed;
- `text` is shown only: a diagram, an output, a formula.

A block that cannot run here has, on the line before it, `<!-- not run: REASON -->`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.service import ROOT

PAGES: Final = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES: Final = ("sh", "python", "toml", "json", "text")
_NOT_RUN: Final = re.compile(r"<!-- not run: (\S.*) -->")
_BLOCK: Final = re.compile(
    r"^(?P<before>[^\n]*)\n```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_INDENTED: Final = re.compile(r"\n\n {4}\S")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """Of its first line of code, from 1."""
    language: str
    code: str
    reason: str
    """Why it cannot run; empty where it can."""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """Return the blocks of a page. Raises AssertionError for one of another form."""
    text = page.read_text() if text is None else text
    assert not _INDENTED.search(_BLOCK.sub("", text)), (
        f"{page}: an indented block; a fenced one says what it is"
    )
    blocks = []
    for match in _BLOCK.finditer(text):
        marker = _NOT_RUN.fullmatch(match["before"])
        line = text.count("\n", 0, match.start("code")) + 1
        language = match["language"].partition(" ")[0]
        block = Block(page, line, language, match["code"], marker[1] if marker else "")
        assert block.reason or language in LANGUAGES, (
            f"{block.where}: {language or 'no language'}: not run, and not marked"
        )
        blocks.append(block)
    return blocks

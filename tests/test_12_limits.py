"""Every limit is read by production code: one that nobody reads bounds nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "kvfs/limits.py"
PARTS = ("kvfs", "tiers", "mounts", "gateway", "scheduler")


def test_every_limit_is_read() -> None:
    tree = ast.parse(LIMITS.read_text())
    named = {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    sources = [
        path for part in PARTS for path in (ROOT / part).rglob("*.py*") if path.suffix in (".py", ".pyx")
    ]
    words: set[str] = set()
    for path in sources:
        text = path.read_text()
        if path == LIMITS:
            words |= {
                node.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            }
        else:
            words |= set(re.findall(r"[A-Z][A-Z0-9_]+", text))
    assert sorted(named - words) == []

"""Every limit is read by production code: one that nobody reads bounds nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ROOT / "kvfs/limits"
PARTS = ("kvfs", "tiers", "mounts", "gateway", "scheduler")


def test_every_limit_is_read() -> None:
    named: set[str] = set()
    words: set[str] = set()
    sources = [path for part in PARTS for path in (ROOT / part).rglob("*.py*")]
    for path in sources:
        if path.parent == LIMITS:
            tree = ast.parse(path.read_text())
            defined = (node.target for node in tree.body if isinstance(node, ast.AnnAssign))
            named |= {target.id for target in defined if isinstance(target, ast.Name)}
            read = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
            words |= {node.id for node in read if isinstance(node.ctx, ast.Load)}
        elif path.suffix in (".py", ".pyx"):
            words |= set(re.findall(r"[A-Z][A-Z0-9_]+", path.read_text()))
    assert named
    assert sorted(named - words) == []

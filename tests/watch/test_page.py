"""The page's files by path."""

from __future__ import annotations

import tracemalloc

from kvfs.watch.page import page_file


def test_paths_without_a_file_cost_no_memory() -> None:
    assert page_file("/page.js") is not None
    tracemalloc.start()
    try:
        assert not any(page_file(f"/{number:01000}") for number in range(1000))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000

"""What the processor's caches hold, on machines that are described by files as the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.system.topology import last_level_cache_bytes


@pytest.mark.parametrize(
    ("said", "size_bytes"),
    [
        (["32K", "32K", "1024K", "32768K"], 32 << 20),
        (["48K", "32K", "2048K", "107520K"], 105 << 20),
        (["64K", "64K", "1024K"], 1 << 20),
        ([], 32 << 20),
        (["32K", "unknown"], 32 << 20),
    ],
)
def test_the_largest_cache_counts(tmp_path: Path, said: list[str], size_bytes: int) -> None:
    for number, size in enumerate(said):
        (tmp_path / f"devices/system/cpu/cpu0/cache/index{number}").mkdir(parents=True)
        (tmp_path / f"devices/system/cpu/cpu0/cache/index{number}/size").write_text(f"{size}\n")
    assert last_level_cache_bytes(tmp_path) == size_bytes

"""Tiers and failures on the command line."""

from __future__ import annotations

import pytest

from kvfs.errors import ConfigError
from scheduler.reports.option_texts import parse_failures, parse_tiers
from scheduler.simulation.options import Failure, LowerTier


def test_tiers_and_failures_are_read_as_they_are_written() -> None:
    assert parse_tiers("nvme:12000:12GB/s:1ms:16,cold:5:80Gbit") == (
        LowerTier("nvme", 12_000, 12e9, 1e-3, 16),
        LowerTier("cold", 5, 10e9, shared=True),
    )
    assert parse_failures("prefill:0:5min:120s,decode:1:600:90") == (
        Failure(0, 300.0, 120.0),
        Failure(1, 600.0, 90.0, decode=True),
    )
    assert (parse_tiers(""), parse_failures("")) == ((), ())


@pytest.mark.parametrize(
    "text", ["nvme", "nvme:x:1GB/s", "nvme:1:fast", "nvme:1:1GB/s:1s:2:3", "nvme:1:1GB/s:0s"]
)
def test_a_tier_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--tiers {text}: "):
        parse_tiers(text)


@pytest.mark.parametrize("text", ["prefill:0:1s", "engine:0:1s:1s", "decode:x:1s:1s", "decode:0:soon:1s"])
def test_a_failure_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--failures {text}: "):
        parse_failures(text)

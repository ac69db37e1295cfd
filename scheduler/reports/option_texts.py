"""The tiers and failures of a simulation, as the command line writes them.

Responsibility: lists of parts with colons, to values. Concurrency: none.
"""

from __future__ import annotations

from dataclasses import replace

from kvfs.config.sizes import parse_duration, parse_rate
from kvfs.errors import ConfigError
from scheduler.simulation.options import Failure, LowerTier

SHARED_TIER = "cold"
"""The name of a tier that is one for all nodes; others are each node's own."""


def parse_tiers(text: str) -> tuple[LowerTier, ...]:
    """Parse `NAME:BLOCKS:RATE[:LATENCY[:DEPTH]],...`, the highest tier first. Raises ConfigError."""
    return tuple(_tier(part) for part in text.split(",") if part)


def _tier(text: str) -> LowerTier:
    try:
        name, blocks, rate, *more = text.split(":")
        tier = LowerTier(name, int(blocks), parse_rate(rate), shared=name == SHARED_TIER)
        if len(more) > 2:
            raise ValueError("too many parts")
        latency_s = parse_duration(more[0]) if more else tier.latency_s
        return replace(tier, latency_s=latency_s, depth=int(more[1]) if more[1:] else tier.depth)
    except ValueError as error:
        raise ConfigError(f"--tiers {text}: {error}; NAME:BLOCKS:RATE[:LATENCY[:DEPTH]] is wanted") from None


def parse_failures(text: str) -> tuple[Failure, ...]:
    """Parse `prefill|decode:NUMBER:AT:DOWN,...`. Raises ConfigError."""
    return tuple(_failure(part) for part in text.split(",") if part)


def _failure(text: str) -> Failure:
    try:
        kind, number, at, down = text.split(":")
        if kind not in ("prefill", "decode"):
            raise ValueError("instances are prefill or decode")
        return Failure(int(number), parse_duration(at), parse_duration(down), kind == "decode")
    except ValueError as error:
        raise ConfigError(
            f"--failures {text}: {error}; prefill:NUMBER:AT:DOWN or decode:... is wanted"
        ) from None

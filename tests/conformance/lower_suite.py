"""The port `LowerTier`, as tests: `class TestMyTier(LowerSuite)` with a fixture `lower`.

`lower` is a store over a small tier: `put(number)` seals an object of OBJECT_BYTES and returns once the tier has it;
`count()` says how many objects the tier has. Besides, the suite uses nothing but `tiers.model.ports.LowerTier`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tiers.model.ports import LowerTier

OBJECT_BYTES = 200_000


@dataclass(frozen=True)
class Lower:
    """A tier, and what the suite does to it."""

    tier: LowerTier
    put: Callable[[int], Awaitable[None]]
    count: Callable[[], int]


class LowerSuite:
    """Inherit, and give a `lower` fixture."""

    async def test_the_largest_object_fits(self, lower: Lower) -> None:
        assert OBJECT_BYTES < lower.tier.largest_object_bytes <= lower.tier.capacity_bytes

    async def test_what_is_written_is_used(self, lower: Lower) -> None:
        before = lower.tier.used_bytes
        for number in range(6):
            await lower.put(number)
        assert lower.count() == 6
        assert lower.tier.used_bytes - before >= 5 * OBJECT_BYTES

    async def test_used_bytes_never_pass_the_capacity(self, lower: Lower) -> None:
        most = 2 * lower.tier.capacity_bytes // OBJECT_BYTES
        for number in range(most):
            await lower.put(number)
            assert lower.tier.used_bytes <= lower.tier.capacity_bytes
        assert 0 < lower.count() < most

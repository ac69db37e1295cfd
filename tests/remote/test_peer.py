"""The health of one peer: what counts as its failure, and how long it is not asked."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from kvfs import limits
from kvfs.errors import TierUnreachable
from tests.support.machines import SECRET
from tiers.remote.greeting import Identity
from tiers.remote.link import PeerLink
from tiers.remote.peer import Peer

OWN = Identity(b"m" * 16, SECRET)


async def test_a_peer_that_stays_down_is_tried_for_days(autojump_clock: MockClock) -> None:
    async def refuse(host: str, port: int, own: Identity) -> tuple[PeerLink, bytes]:
        raise OSError("refused")

    peer = Peer("peer:1", "peer", 1, OWN, refuse)
    with trio.move_on_after(3 * 86_400):
        await peer.run()
    assert peer.counts["failures"] > 3 * 86_400 / limits.MAX_REMOTE_BACKOFF_S / 1.5
    with pytest.raises(TierUnreachable):
        await peer.match(bytes(16), bytes(16), 1.0)

"""The segments of one pool: made, sent to clients, released.

Responsibility: descriptors, who has which segment mapped, and how much of the device that is.

Invariants:
- The segments' bytes never pass the capacity by a segment that was made here. A segment counts until its descriptor
  is closed here *and* no client has it mapped: the device has its memory as long.
- A segment's number is used once; its token, too, by which it is known after a restart.
Concurrency: the service's thread only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvfs.errors import NoSpace
from tiers.hbm.clients import PoolClient
from tiers.hbm.driver_ports import SegmentMaker


@dataclass(slots=True, eq=False)
class DeviceSegment:
    """Describes one segment."""

    number: int
    token: bytes
    fd: int
    """-1 once released."""
    retiring: bool = False
    """Released with its last slot."""
    adopted: bool = False
    """From an earlier service."""
    clients: set[PoolClient] = field(default_factory=set)
    """Who was sent the descriptor and has not unmapped it."""


class DeviceSegments:
    """Keeps the segments of one pool."""

    def __init__(
        self, maker: SegmentMaker, capacity_bytes: int, segment_bytes: int, make_token: Callable[[], bytes]
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._make_token = make_token
        self._segment_bytes = segment_bytes
        self._maker = maker
        self._segments: dict[int, DeviceSegment] = {}
        self._next = 0

    def __iter__(self) -> Iterator[DeviceSegment]:
        return iter(list(self._segments.values()))

    @property
    def physical_bytes(self) -> int:
        """Return what the pool takes of the device."""
        return len(self._segments) * self._segment_bytes

    def make(self) -> DeviceSegment:
        """Make a segment. Raises NoSpace where the capacity or the device has no room, DeviceFailed."""
        self._check_room()
        return self._add(self._maker.make(self._segment_bytes), self._make_token())

    def adopt(self, fd: int, token: bytes) -> DeviceSegment:
        """Take over a segment of an earlier service; the descriptor is then this object's. Raises NoSpace."""
        self._check_room()
        segment = self._add(fd, token)
        segment.retiring = segment.adopted = True
        return segment

    def _check_room(self) -> None:
        if self.physical_bytes + self._segment_bytes > self.capacity_bytes:
            raise NoSpace(
                f"HBM tier {self._maker.device}: {self.physical_bytes} bytes of segments of {self.capacity_bytes}, "
                f"no room for {self._segment_bytes}"
            )

    def _add(self, fd: int, token: bytes) -> DeviceSegment:
        segment = DeviceSegment(self._next, token, fd)
        self._next += 1
        self._segments[segment.number] = segment
        return segment

    def get(self, number: int) -> DeviceSegment | None:
        """Return the segment of this number; None where there is none."""
        return self._segments.get(number)

    def of_token(self, token: bytes) -> DeviceSegment | None:
        """Return the segment that is known by this token."""
        return next((segment for segment in self if segment.token == token), None)

    def release(self, segment: DeviceSegment) -> None:
        """Close a segment's descriptor: it goes once no client has it mapped."""
        os.close(segment.fd)
        segment.fd = -1
        self._drop_unmapped(segment)

    def unmap(self, segment: DeviceSegment, client: PoolClient) -> None:
        """Note that a client no longer has a segment mapped."""
        segment.clients.discard(client)
        self._drop_unmapped(segment)

    def _drop_unmapped(self, segment: DeviceSegment) -> None:
        if segment.fd < 0 and not segment.clients:
            del self._segments[segment.number]

    def close(self) -> None:
        """Close all descriptors: what clients have mapped stays theirs."""
        for segment in self:
            if segment.fd >= 0:
                os.close(segment.fd)
        self._segments.clear()

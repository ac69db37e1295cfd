"""The pools of a service: one for each device and uid, made by the first process that attaches.

Responsibility: find or make a pool, share a device's capacity among its pools, end those that nobody uses.

Invariants: the segments of all pools of a device together never pass its capacity. A pool without processes gives its
segments up when it has no blocks left, or when another uid's pool finds no room.
Concurrency: the service's thread only.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvfs import limits
from kvfs.errors import InvalidRequest, NoSpace, NotFound
from tiers.eviction.policy import EvictionPolicy
from tiers.hbm.allocator import Place
from tiers.hbm.clients import PoolClient
from tiers.hbm.driver_ports import DeviceHolders, NoHolders, SegmentMaker
from tiers.hbm.handover import ExpectedChecksum, HandedBlock
from tiers.hbm.segment_tokens import SegmentTokens
from tiers.hbm.tier import HbmTier
from tiers.hbm.uid_pool import PoolCounts, UidPool
from tiers.model.tier import Extent


@dataclass(slots=True)
class Seat:
    """Holds a process's place in a pool."""

    pool: UidPool
    client: PoolClient
    tokens: SegmentTokens


class SharedDevice:
    """Makes segments of one device for the pools of all uids."""

    def __init__(self, maker: SegmentMaker, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.pools: dict[int, UidPool] = {}
        """By uid."""
        self._maker = maker

    @property
    def device(self) -> str:
        """Return the UUID of the device."""
        return self._maker.device

    @property
    def physical_bytes(self) -> int:
        """Return what all pools take of the device."""
        return sum(pool.tier.physical_bytes for pool in self.pools.values())

    def make(self, size_bytes: int) -> int:
        """Make a segment; pools that no process uses make room for it. Raises NoSpace, DeviceFailed."""
        self.make_room(size_bytes)
        return self._maker.make(size_bytes)

    def make_room(self, size_bytes: int) -> None:
        """Have room for a segment within the capacity; pools that no process uses are ended for it. Raises NoSpace."""
        if self.physical_bytes + size_bytes > self.capacity_bytes:
            self.end([uid for uid, pool in self.pools.items() if pool.is_idle])
        if self.physical_bytes + size_bytes > self.capacity_bytes:
            raise NoSpace(
                f"HBM tier {self.device}: its pools have {self.physical_bytes} bytes of {self.capacity_bytes}, "
                f"no room for {size_bytes}"
            )

    def end(self, uids: Sequence[int]) -> None:
        """End the pools of these uids, with their blocks."""
        for uid in uids:
            self.pools.pop(uid).tier.close()


class DevicePools:
    """See the module's header. Without devices nobody can attach."""

    def __init__(
        self,
        devices: Sequence[SharedDevice] = (),
        *,
        policy: Callable[[], EvictionPolicy[bytes]],
        expected: ExpectedChecksum,
        missing: Sequence[str] = (),
        token_key: bytes = b"",
        holders: DeviceHolders | None = None,
        segment_bytes: int = limits.HBM_SEGMENT_BYTES,
        max_slots: int = limits.HBM_SLOTS,
    ) -> None:
        """Take the devices, and what says which checksum the store has for a block. `missing`: which are left
        out, and why. `token_key`: of the store, so that it knows its segments after a restart."""
        self.missing = list(missing)
        self.start = secrets.token_hex(limits.HBM_TOKEN_BYTES)
        """The random mark of this start, by which clients know whether they have an earlier service's segments."""
        self._token_key = token_key or secrets.token_bytes(limits.HBM_SEGMENT_TOKEN_BYTES)
        self.counts = PoolCounts()
        self._devices = {device.device: device for device in devices}
        self._policy, self._expected, self._holders = policy, expected, holders or NoHolders()
        self._segment_bytes, self._max_slots = segment_bytes, max_slots

    @property
    def devices(self) -> list[str]:
        """Return the UUIDs of the devices that have pools."""
        return list(self._devices)

    @property
    def has_pools(self) -> bool:
        """Return whether there is any pool now."""
        return any(device.pools for device in self._devices.values())

    def _pools(self) -> Iterator[UidPool]:
        for device in self._devices.values():
            yield from device.pools.values()

    def attach(
        self,
        device: str,
        uid: int,
        pid: int,
        open_pidfd: Callable[[], int],
        *,
        token: int = 0,
        left: Container[int] = (),
    ) -> Seat:
        """Give a process a place in its uid's pool, known by `token`, once those that it has `left` are free.

        Raises NotFound for a device without pools, LimitExceeded.
        """
        shared = self._devices.get(device)
        if shared is None:
            raise NotFound(f"no memory of device {device[:64]!r} is shared here")
        if uid not in shared.pools:
            shared.pools[uid] = self._make_pool(shared, uid)
        pool = shared.pools[uid]
        for each in self._devices.values():
            if uid in each.pools:
                each.pools[uid].tier.detach_left(pid, left)
        return Seat(pool, pool.tier.attach(pid, open_pidfd(), token), self._tokens(shared, uid))

    def adopt(
        self, seat: Seat, fd: int, token: bytes, blocks: Sequence[HandedBlock]
    ) -> list[tuple[Extent, Place] | None]:
        """Take over a segment as `UidPool.adopt` does, if its token was made here for this pool and the device has room
        for it. Raises InvalidRequest, NoSpace, Superseded."""
        tier = seat.pool.tier
        try:
            if not seat.tokens.has_made(token):
                raise InvalidRequest(
                    f"token {token.hex()} is of no segment that this store made on device {tier.device} for this uid"
                )
            if tier.segment_of(token) is None:
                self._devices[tier.device].make_room(tier.segment_bytes)
        except BaseException:
            os.close(fd)
            raise
        return seat.pool.adopt(seat.client, fd, token, blocks)

    def _tokens(self, shared: SharedDevice, uid: int) -> SegmentTokens:
        return SegmentTokens(self._token_key, shared.device, uid, self._segment_bytes)

    def _make_pool(self, shared: SharedDevice, uid: int) -> UidPool:
        tier = HbmTier(
            shared,
            shared.capacity_bytes,
            holders=self._holders,
            segment_bytes=self._segment_bytes,
            max_slots=self._max_slots,
            make_token=self._tokens(shared, uid).make,
        )
        return UidPool(tier, self._policy(), self._expected, self.counts)

    def remove(self, digest: bytes) -> None:
        """Drop a block that was removed from the store by somebody, everywhere."""
        for pool in self._pools():
            pool.blocks.remove(digest)

    def remove_other_buckets(self, bucket_ids: Container[int]) -> None:
        """Drop the blocks of buckets that are not among these."""
        for pool in self._pools():
            pool.blocks.remove_other_buckets(bucket_ids)

    def sweep(self) -> None:
        """Free what nobody uses any more, and end pools without processes and blocks."""
        for device in self._devices.values():
            for pool in device.pools.values():
                pool.tier.sweep()
            device.end([uid for uid, pool in device.pools.items() if pool.is_idle and not pool.blocks])

    def status(self) -> dict[str, Any]:
        """Return what `status` shows."""
        devices = self._devices.values()
        described = [pool.describe(uid) for device in devices for uid, pool in device.pools.items()]
        return {
            "missing": [*self.missing, *self._holders.missing()],
            "devices": self.devices,
            "capacity_bytes": sum(device.capacity_bytes for device in devices),
            "segment_bytes": sum(device.physical_bytes for device in devices),
            "used_bytes": sum(each["used_bytes"] for each in described),
            "held_bytes": sum(each["held_bytes"] for each in described),
            "blocks": sum(each["blocks"] for each in described),
            "clients": sum(each["clients"] for each in described),
            **asdict(self.counts),
            "pools": described,
        }

    def close(self) -> None:
        """End all pools. What processes have mapped stays theirs."""
        for device in self._devices.values():
            device.end(list(device.pools))

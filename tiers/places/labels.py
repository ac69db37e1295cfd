"""The label that begins a block device of the NVMe tier, and which devices make a store's tier together.

Responsibility: a device as a value, its label as bytes (docs/formats.md), and the rules: a device of another store, a
copy, one that shrank and one that is missing are refused.

Invariants: a device that the tier once had is never replaced by an empty one without a word. Concurrency: pure values.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvfs import formats, limits
from kvfs.config.sizes import format_size
from kvfs.errors import Corrupt, FormatMismatch
from kvfs.formats import DEVICE_LABEL, DEVICE_LABEL_COPIES, DEVICE_SEGMENTS_START
from tiers.places.geometry import Geometry

PAGE_BYTES: Final = 4096
LABEL_BYTES: Final = len(DEVICE_LABEL_COPIES) * PAGE_BYTES
_LIVES_BITS: Final = 40
"""Each device that is taken has its lives begin so far beyond all others: a trillion segments are filled before."""


@dataclass(frozen=True, slots=True)
class Label:
    """Says whose a block device is, and what of it are segments."""

    store_id: bytes
    number: int
    """Of the device in the store."""
    segment_bytes: int
    segments: int
    first_sequence: int
    """No segment has a life that is older: what the device held before is never read."""

    def encode(self) -> bytes:
        """Return both copies."""
        page = formats.encode_page(
            DEVICE_LABEL,
            magic=formats.DEVICE_LABEL_MAGIC,
            version=formats.SEGMENT_VERSION,
            device_number=self.number,
            store_id=self.store_id,
            segment_bytes=self.segment_bytes,
            segments=self.segments,
            first_sequence=self.first_sequence,
            written_ns=time.time_ns(),
        )
        return page * len(DEVICE_LABEL_COPIES)


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """Describes a block device as it was found."""

    path: Path
    size_bytes: int
    label: Label | None
    """None: it is empty."""

    def room(self, segment_bytes: int) -> int:
        """Return how many segments there is room for."""
        return min(
            (self.size_bytes - DEVICE_SEGMENTS_START) // segment_bytes, 1 << formats.DEVICE_NUMBER_SHIFT
        )


def decode_label(data: bytes) -> Label:
    """Decode whichever copy is the newer of those that are whole. Raises Corrupt, FormatMismatch."""
    good, problem = [], None
    for at in DEVICE_LABEL_COPIES:
        try:
            good.append(
                formats.decode_page(DEVICE_LABEL, formats.DEVICE_LABEL_MAGIC, data[at : at + PAGE_BYTES])
            )
        except Corrupt as error:
            problem = error
    if not good:
        raise problem or Corrupt("no label")
    raw = max(good, key=lambda raw: (raw["segments"], raw["written_ns"]))
    return Label(
        raw["store_id"], raw["device_number"], raw["segment_bytes"], raw["segments"], raw["first_sequence"]
    )


def in_order(found: Sequence[BlockDevice], store_id: bytes, known: Geometry | None) -> list[BlockDevice]:
    """Order a store's devices by their numbers, empty ones last. Raises FormatMismatch where they are not the store's,
    or not all of those that it `known`ly has."""
    devices: dict[int, BlockDevice] = {}
    for each in found:
        if each.label is None:
            continue
        _check(each, each.label, store_id)
        other = devices.setdefault(each.label.number, each)
        if other is not each:
            raise FormatMismatch(
                f"{other.path} and {each.path} are both device {each.label.number} of the store: one is a copy"
            )
    empty = [each for each in found if each.label is None]
    last_names = () if known is None else known.devices
    count = max([len(last_names), *(number + 1 for number in devices)])
    for number in range(count):
        if number not in devices:
            name = f", {last_names[number]} when it was last used," if number < len(last_names) else ""
            empties = f"; {empty[0].path} is empty: it lost what it held, or is another one" if empty else ""
            raise FormatMismatch(
                f"device {number} of the store{name} is not among those of [nvme] device{empties}"
            )
    sizes = {each.label.segment_bytes for each in devices.values() if each.label}
    if known is not None and known.devices:
        sizes.add(known.segment_bytes)
    if len(sizes) > 1:
        raise FormatMismatch(f"the store's devices have segments of different sizes: {sorted(sizes)} bytes")
    return [devices[number] for number in sorted(devices)] + empty


def _check(device: BlockDevice, label: Label, store_id: bytes) -> None:
    if label.store_id != store_id:
        raise FormatMismatch(
            f"{device.path} holds segments of store {label.store_id.hex()}, not of {store_id.hex()}; "
            f"`kvfs device clear --force {device.path}` empties it"
        )
    if label.number >= limits.MAX_NVME_DEVICES:
        raise FormatMismatch(
            f"{device.path}: device {label.number} of {limits.MAX_NVME_DEVICES} that a store can have"
        )
    if device.room(label.segment_bytes) < label.segments:
        needed = DEVICE_SEGMENTS_START + label.segments * label.segment_bytes
        raise FormatMismatch(
            f"{device.path} has {format_size(device.size_bytes)}, of {format_size(needed)} that the store has on it: "
            "it shrank, or is not the whole device"
        )


def new_labels(
    devices: Sequence[BlockDevice], store_id: bytes, segment_bytes: int
) -> list[tuple[BlockDevice, Label]]:
    """Give each device of `in_order` the label that it is to have: a number where it has none, and all its room, as
    far as the store may have more segments."""
    wanted = []
    left = limits.MAX_SEGMENTS - sum(each.label.segments for each in devices if each.label)
    first = max((each.label.first_sequence for each in devices if each.label), default=secrets.randbits(60))
    for number, each in enumerate(devices):
        has = 0 if each.label is None else each.label.segments
        segments = has + min(each.room(segment_bytes) - has, left)
        left -= segments - has
        if each.label is None:
            first += (1 << _LIVES_BITS) + secrets.randbits(_LIVES_BITS)
            wanted.append((each, Label(store_id, number, segment_bytes, segments, first)))
        else:
            wanted.append((each, replace(each.label, segments=segments)))
    return wanted

"""`pool.json`, in the directory of the NVMe tier: whose the segments are, how large, and on which block devices.

Concurrency: blocking reads and writes of one small file, at a start and in a repair.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvfs import formats
from kvfs.errors import FormatMismatch

GEOMETRY: Final = "pool.json"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Holds what `pool.json` says."""

    store_id: bytes
    segment_bytes: int
    devices: tuple[Path, ...] = ()
    """The block devices of the segments, by number, as they were named last; none: the segments are files beside it."""
    version: int = formats.SEGMENT_VERSION


def read_geometry(directory: Path) -> Geometry:
    """Read it, whatever it says. Raises OSError, ValueError, KeyError, TypeError."""
    said = json.loads((directory / GEOMETRY).read_text())
    return Geometry(
        bytes.fromhex(said["store_id"]),
        int(said["segment_bytes"]),
        tuple(Path(path) for path in said.get("devices", ())),
        int(said["format"]),
    )


def write_geometry(directory: Path, geometry: Geometry) -> None:
    """Write it, so that a kill leaves the old one or the new one."""
    said = {
        "format": geometry.version,
        "store_id": geometry.store_id.hex(),
        "segment_bytes": geometry.segment_bytes,
    }
    if geometry.devices:
        said["devices"] = [str(path) for path in geometry.devices]
    temporary = directory / (GEOMETRY + ".new")
    temporary.write_text(json.dumps(said) + "\n")
    with temporary.open() as file:
        os.fsync(file.fileno())
    temporary.rename(directory / GEOMETRY)


def known_geometry(directory: Path, store_id: bytes) -> Geometry | None:
    """Read what there is; None: no segments were made there. Raises FormatMismatch for another store, a newer format,
    or a file that makes no sense."""
    path = directory / GEOMETRY
    try:
        known = read_geometry(directory)
    except FileNotFoundError:
        if any(directory.glob("*.seg")):
            raise FormatMismatch(f"{directory} holds segment files, but no {GEOMETRY}") from None
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise FormatMismatch(f"{path} does not say what the segment files are: {error}") from None
    if known.version > formats.SEGMENT_VERSION:
        raise FormatMismatch(
            f"{path} says format {known.version}, this kvfs reads up to {formats.SEGMENT_VERSION}"
        )
    if known.store_id != store_id:
        raise FormatMismatch(
            f"{directory} holds the segments of store {known.store_id.hex()}, not of {store_id.hex()}"
        )
    return known

"""Sizes, rates and durations as text. Pure functions."""

from __future__ import annotations

import re

from kvfs.limits import GIB, KIB, MIB

_UNITS = {
    "": 1,
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": KIB * GIB,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)\Z")


def parse_size(text: str | int) -> int:
    """Parse a number of bytes, or text such as "10GiB", "1.5 GiB" or "500MB". Raises ValueError."""
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError('a size is a number of bytes or text such as "10GiB"')
    if isinstance(text, int):
        return text
    match = _SIZE.match(text.strip())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ValueError(
            f'a size is a number of bytes or text such as "10GiB"; units: {", ".join(_UNITS)[2:]}'
        )
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_size(size_bytes: int) -> str:
    """Format a size in binary units with at most one decimal: "10 GiB", "1.5 MiB", "12 B"."""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < KIB or unit == "TiB":
            break
        value /= KIB
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT])(bit|B)(?:/s|ps)?\Z")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|min)?\Z")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def parse_rate(text: str) -> float:
    """Parse text such as "100Gbit" or "12.5GB/s" (decimal units) to bytes a second. Raises ValueError."""
    match = _RATE.match(text.strip())
    if match is None or not float(match[1]):
        raise ValueError('a rate is text such as "100Gbit" or "12.5GB/s"')
    return float(match[1]) * 1000.0 ** (" kMGT".index(match[2])) / (8 if match[3] == "bit" else 1)


def parse_duration(text: str, *, bare: str = "s") -> float:
    """Parse text such as "30s" or "60ms" to seconds; a number alone is in the unit `bare`. Raises ValueError."""
    match = _DURATION.match(text.strip())
    if match is None or not float(match[1]):
        raise ValueError('a duration is a number above 0 with a unit, such as "30s" or "60ms"')
    return float(match[1]) * _SECONDS[match[2] or bare]

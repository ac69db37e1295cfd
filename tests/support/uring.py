"""Whether io_uring can be tested here."""

from __future__ import annotations

import pytest

from kvfs._native.device.uring import Ring
from kvfs.errors import DeviceMissing


def _why_not() -> str:
    try:
        Ring(1, 1).close(1)
    except DeviceMissing as error:
        return str(error)
    return ""


needs_uring = pytest.mark.skipif(_why_not() != "", reason=_why_not())

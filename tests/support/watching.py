"""Where pages are, for tests that look at them."""

from __future__ import annotations

import re
import time

from tests.support.gateway import Gateway
from tests.support.waits import WAIT_S

_PAGE = re.compile(r"^page +(http://\S+/)$", re.MULTILINE)


def page_url(door: Gateway, process: int = 1) -> str:
    """Return the page of an endpoint's service, of its process of this number."""
    end = time.monotonic() + WAIT_S
    while len(found := _PAGE.findall(door.service.log())) < process:
        assert time.monotonic() < end, door.service.log()
        time.sleep(0.01)
    return str(found[process - 1])

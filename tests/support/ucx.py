"""UCX where it is built, over TCP on the loopback interface, which every machine has.

Concurrency: none.
"""

from __future__ import annotations

import os

import pytest

from kvfs.errors import ConfigError
from tiers.remote.connections.fabric import Fabric, load_fabric

for name, value in {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}.items():
    os.environ.setdefault(name, value)


def fabric_or_skip() -> Fabric:
    """Return this process's UCX; skip the test, saying why, where there is none."""
    try:
        return load_fabric()
    except ConfigError as error:
        pytest.skip(str(error))

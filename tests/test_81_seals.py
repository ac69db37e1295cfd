"""Blocks sealed beside the event loop: at once at every door, the first one wins, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

import kvfs
from kvfs import errors
from kvfs._native.sealer import Sealer
from kvfs.keys import block_name
from kvfs.messages import BlockSeal, DigestBatch, Op, Reserve, SealBlocks
from tests.support.sessions import MIB, RawClient, Server, fork, session_server
from tests.support.tmpfs import TmpfsError, tmpfs
from tests.test_41_sessions import NAMESPACE, descriptors, extents, results

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs a private tmpfs")

SEAL = struct.Struct("<II16s16sIIQ")
RESULT = struct.Struct("<iIQ")

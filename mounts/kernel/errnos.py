"""The errno that a caller sees for what a handler raises: the mount's one place for that.

Invariant: nothing but FUSEError ever reaches pyfuse3, and nothing at all escapes a call's handler, so no
request can end the mount.
"""

from __future__ import annotations

import errno
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import pyfuse3

from kvfs.errors import KvfsError
from kvfs.system.latencies import Latencies
from mounts.kernel.call_queue import CallQueue

log = logging.getLogger("kvfs.mount")

P = ParamSpec("P")
R = TypeVar("R")


def errno_of(error: Exception, what: str) -> int:
    """Log an error at its own level, and return the errno for the caller: EIO for an unforeseen one."""
    if isinstance(error, KvfsError):
        log.log(min(error.log_level, logging.INFO), "%s: %s", what, error)
        return error.errno
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if isinstance(error, pyfuse3.FUSEError):
        return error.errno
    log.error("%s failed", what, exc_info=error)
    return errno.EIO


class HasCalls(Protocol):
    """Handlers of a mount, with its queue of calls and its latencies."""

    latencies: Latencies

    @property
    def calls(self) -> CallQueue:
        """Return the mount's queue of calls."""


V = TypeVar("V", bound=HasCalls)


def answers_errno(
    method: Callable[Concatenate[V, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[V, P], Coroutine[Any, Any, R]]:
    """Wrap a handler of pyfuse3.Operations, so that calls the kernel made before its request are handled first."""

    @functools.wraps(method)
    async def answer(self: V, /, *args: P.args, **kwargs: P.kwargs) -> R:
        began_s = time.perf_counter()
        self.calls.catch_up()
        try:
            return await method(self, *args, **kwargs)
        except Exception as error:
            raise pyfuse3.FUSEError(errno_of(error, method.__name__)) from None
        finally:
            self.latencies.observe(method.__name__, time.perf_counter() - began_s)

    return answer

"""What a handler raises becomes the errno that the caller sees: the mount's one place for that.

Invariant: nothing but FUSEError ever reaches pyfuse3, and nothing at all leaves a call's handler, so no
request can end the mount.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import pyfuse3

from kvfs.errors import KvfsError

if TYPE_CHECKING:
    from mounts.view import View

log = logging.getLogger("kvfs.mount")

P = ParamSpec("P")
R = TypeVar("R")


def errno_of(error: Exception, what: str) -> int:
    """The errno for the caller, and a log line at the error's own level; what nobody foresaw is EIO."""
    if isinstance(error, KvfsError):
        log.log(min(error.log_level, logging.INFO), "%s: %s", what, error)
        return error.errno
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if isinstance(error, pyfuse3.FUSEError):
        return error.errno
    log.error("%s failed", what, exc_info=error)
    return errno.EIO


class Viewing(Protocol):
    """A handler's object."""

    view: View


V = TypeVar("V", bound=Viewing)


def answers_errno(
    method: Callable[Concatenate[V, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[V, P], Coroutine[Any, Any, R]]:
    """Wrap a handler of pyfuse3.Operations. Calls that the kernel made before this request go first."""

    @functools.wraps(method)
    async def answer(self: V, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.view.catch_up()
        try:
            return await method(self, *args, **kwargs)
        except Exception as error:
            raise pyfuse3.FUSEError(errno_of(error, method.__name__)) from None

    return answer

"""What a handler raises becomes the errno that the caller sees: the mount's one place for that.

Invariant: nothing but FUSEError ever reaches pyfuse3, so no request can end the mount.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import pyfuse3

from kvfs.errors import KvfsError

log = logging.getLogger("kvfs.mount")

P = ParamSpec("P")
R = TypeVar("R")


def answers_errno(method: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Wrap a handler of pyfuse3.Operations."""

    @functools.wraps(method)
    async def answer(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(*args, **kwargs)
        except KvfsError as error:
            log.log(min(error.log_level, logging.INFO), "%s: %s", method.__name__, error)
            raise pyfuse3.FUSEError(error.errno) from None
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
        except pyfuse3.FUSEError:
            raise
        except Exception:
            log.exception("%s failed", method.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return answer

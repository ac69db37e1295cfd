"""`kvfs` with one function that fails: `python -m tests.support.failing_start HOW WHERE ARGUMENT ...`.

HOW: `error`, it raises EMFILE; `descriptors`, from its call on there are no more descriptors than are open then.
"""

from __future__ import annotations

import errno
import inspect
import os
import pkgutil
import resource
import sys
from typing import Any, Final

from kvfs.cli.main import main

MODULE: Final = "tests.support.failing_start"


def fail(how: str) -> None:
    if how == "error":
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    least = os.dup(0)
    os.close(least)
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, least))


def make_fail(how: str, where: str) -> None:
    """Have the function of that name fail, before it does what it did."""
    place, _, name = where.rpartition(".")
    owner = pkgutil.resolve_name(place)
    known = getattr(owner, name)

    async def fail_later(*arguments: Any, **options: Any) -> Any:
        fail(how)
        return await known(*arguments, **options)

    def fail_now(*arguments: Any, **options: Any) -> Any:
        fail(how)
        return known(*arguments, **options)

    setattr(owner, name, fail_later if inspect.iscoroutinefunction(known) else fail_now)


if __name__ == "__main__":
    make_fail(sys.argv.pop(1), sys.argv.pop(1))
    main()

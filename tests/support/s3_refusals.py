"""How the S3 door refuses: the code of a refusal, and the status that a client sees.

Concurrency: any thread.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.protocol.errors import S3Error

OK, FAILED, SAME = 200, 412, 304


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(S3Error) as caught:
        call()
    return caught.value.code


def status_of(check: object, *arguments: object) -> int:
    assert callable(check)
    try:
        check(*arguments)
    except S3Error as error:
        return error.status
    return OK

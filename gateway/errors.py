"""The one S3 error table: code -> HTTP status and default message; and what kvfs errors become there.

`S3Error` is what every module of the gateway raises for a request that fails on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvfs.errors import KvfsError


class S3Error(Exception):
    """A failed request. `detail` are further elements of the error document, `headers` of the answer."""

    def __init__(
        self,
        code: str,
        message: str | None = None,
        *,
        detail: Mapping[str, str] = {},  # noqa: B006
        headers: Mapping[str, str] = {},  # noqa: B006
    ) -> None:
        """`message` None: the table's. Raises KeyError for a code that is not in the table."""
        raise NotImplementedError

    code: str
    status: int
    message: str
    detail: Mapping[str, str]
    headers: Mapping[str, str]


def from_kvfs(error: KvfsError, resource: str) -> S3Error:
    """The S3 error that a failure of the store becomes; `resource` is `bucket/key`. Never tells more than its code."""
    raise NotImplementedError

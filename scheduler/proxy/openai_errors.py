"""Failures in the form that OpenAI's clients read.

Responsibility: `Failure`, with its status, type and headers, as an answer's body and as an event of a stream.

Concurrency: pure values.
"""

from __future__ import annotations

import json
import math

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_JSON = ("Content-Type", "application/json")


class Failure(Exception):
    """A request ends without an answer of an engine."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    def body(self) -> bytes:
        """Return the failure as OpenAI's JSON."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def event(self) -> bytes:
        """Return the event that ends a stream."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers of the answer."""
        headers = [_JSON]
        if self.retry_after_s is not None:
            headers.append(("Retry-After", str(max(1, math.ceil(self.retry_after_s)))))
        if self.status == 401:
            headers.append(("WWW-Authenticate", "Bearer"))
        return headers


def as_failure(status: int, body: bytes) -> bytes:
    """Return an engine's error body, in OpenAI's form if it is not in that already."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        return body
    text = found.get("message") if isinstance(found, dict) else None
    text = text if isinstance(text, str) else body[:1024].decode("utf-8", "replace").strip()
    return Failure(status, text or f"the engine answered {status}").body()

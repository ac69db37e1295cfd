"""Settings that are addresses, or URLs of engines, Conductors and directories; their errors say what is allowed.

Invariants: no password may end a URL early, so that no message shows a part of it. Concurrency: pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr
from pydantic_core import PydanticCustomError

from kvfs.config.server_urls import check_asked_url, check_named_once, check_server_url
from kvfs.limits import MAX_CONDUCTOR_INSTANCES, MAX_PROXY_ENGINES


def _checked(check: Callable[[str], str]) -> Callable[[str], str]:
    """Return a check whose error is that of a setting."""

    def checked(url: str) -> str:
        try:
            return check(url)
        except ValueError as error:
            raise PydanticCustomError("url", "{reason}", {"reason": str(error)}) from None

    return checked


def _endpoint(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise PydanticCustomError("endpoint", "must be HOST:PORT, such as 127.0.0.1:9000 or [::]:9000")
    return text


def host_and_port(text: str) -> tuple[str, int]:
    """Split `HOST:PORT` of a valid setting; an empty host means every address."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


_SERVER = r"rediss?://([^/\s@?#]*@)?[^/\s@?#]+(/\d+)?|unix://\S+"
_CLUSTER = r"rediss?\+cluster://([^/\s@?#]*@)?[^/\s@,?#]+:\d+(,[^/\s@,?#]+:\d+)*/?"


def _directory_url(value: SecretStr) -> SecretStr:
    if not re.fullmatch(f"({_SERVER}|{_CLUSTER})", value.get_secret_value()):
        raise PydanticCustomError(
            "directory",
            "must be redis://HOST:PORT/DB, rediss://..., unix:///PATH or redis+cluster://HOST:PORT,HOST:PORT",
        )
    return value


Endpoint = Annotated[str, AfterValidator(_endpoint)]
DirectoryUrl = Annotated[SecretStr, AfterValidator(_directory_url)]
EngineUrl = Annotated[str, AfterValidator(_checked(check_server_url))]
ConductorUrl = Annotated[str, AfterValidator(_checked(lambda url: check_server_url(url) if url else ""))]
AskedUrl = Annotated[str, AfterValidator(_checked(check_asked_url))]
AskedUrls = Annotated[tuple[AskedUrl, ...], Field(max_length=MAX_CONDUCTOR_INSTANCES)]
EngineUrls = Annotated[tuple[AskedUrl, ...], Field(max_length=MAX_PROXY_ENGINES)]


def check_engines_once(**urls: tuple[str, ...]) -> None:
    """Check that no two settings name one engine; `urls`: by key. Raises PydanticCustomError."""
    try:
        check_named_once(urls)
    except ValueError as error:
        raise PydanticCustomError("engines", "{reason}", {"reason": str(error)}) from None

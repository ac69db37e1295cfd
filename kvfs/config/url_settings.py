"""Settings that are URLs of engines and Conductors; their errors say what is allowed. Concurrency: pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field
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

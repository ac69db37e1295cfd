"""Bearer tokens: which requests have one."""

from __future__ import annotations

import pytest

from kvfs.http.bearer_tokens import BearerTokens
from kvfs.http.head import Head, parse_head


def head(*fields: str) -> Head:
    return parse_head("\r\n".join(["GET / HTTP/1.1", "Host: a", *fields, "\r\n"]).encode("latin-1"))


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        (["Authorization: Bearer first-token"], True),
        (["authorization:  Bearer second-tokén"], False),
        (["X: 1", "AUTHORIZATION: Bearer second-token"], True),
        ([], False),
        (["Authorization: Bearer"], False),
        (["Authorization: Bearer first-toke"], False),
        (["Authorization: Bearer first-tokenn"], False),
        (["Authorization: Basic first-token"], False),
        (["Authorization: first-token"], False),
        (["Authorization: Bearer x", "Authorization: Bearer first-token"], False),
        (["Proxy-Authorization: Bearer first-token"], False),
    ],
)
def test_a_request_needs_one_of_the_tokens_whole(fields: list[str], allowed: bool) -> None:
    tokens = BearerTokens(["first-token", "second-token"])
    assert bool(tokens)
    assert tokens.allow(head(*fields)) is allowed


def test_without_tokens_everybody_may_ask() -> None:
    tokens = BearerTokens([])
    assert not tokens
    assert tokens.allow(head())


def test_tokens_are_not_kept() -> None:
    assert b"first-token" not in repr(vars(BearerTokens(["first-token"]))).encode()

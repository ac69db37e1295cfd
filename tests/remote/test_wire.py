"""The greeting's bytes and proofs."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import FormatMismatch, KvfsError, NotPermitted
from tests.support.rogue_peers import ITEM, MATCHED, REQUEST, WANT
from tiers.remote.wire import HELLO_BYTES, PROOF_BYTES, WELCOME_BYTES, Hello, Proofs, decode_hello

IDS, NONCES = st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32)


@given(IDS, NONCES, NONCES)
def test_who_knows_the_secret_is_believed(store_id: bytes, nonce: bytes, server_nonce: bytes) -> None:
    hello = Hello(store_id, nonce)
    assert decode_hello(hello.encode()) == hello
    proofs = Proofs(b"secret", hello, server_nonce)
    proofs.check_asker(proofs.of_asker())
    assert proofs.check_welcome(proofs.welcome(store_id)) == store_id


def test_a_proof_serves_one_role_of_one_connection() -> None:
    hello = Hello(bytes(16), bytes(32))
    proofs = Proofs(b"secret", hello, bytes(32))
    others = [
        Proofs(b"other", hello, bytes(32)),
        Proofs(b"secret", Hello(b"1" * 16, bytes(32)), bytes(32)),
        Proofs(b"secret", Hello(bytes(16), b"1" * 32), bytes(32)),
        Proofs(b"secret", hello, b"1" * 32),
    ]
    for other in others:
        with pytest.raises(NotPermitted):
            proofs.check_asker(other.of_asker())
        with pytest.raises(NotPermitted):
            proofs.check_welcome(other.welcome(bytes(16)))
    with pytest.raises(NotPermitted):
        proofs.check_asker(proofs.welcome(b"")[:PROOF_BYTES])
    with pytest.raises(NotPermitted):
        proofs.check_welcome(b"1" * 16 + proofs.welcome(bytes(16))[16:])


@given(st.binary(max_size=2 * HELLO_BYTES))
def test_any_bytes_are_a_greeting_or_refused(data: bytes) -> None:
    with suppress(KvfsError):
        assert decode_hello(data).encode() == data


def test_another_version_is_named() -> None:
    data = bytearray(Hello(bytes(16), bytes(32)).encode())
    data[8] = 9
    with pytest.raises(FormatMismatch, match="version 9"):
        decode_hello(bytes(data))


def test_sizes_are_those_of_the_page() -> None:
    assert (HELLO_BYTES, WELCOME_BYTES) == (64, 48)
    assert (REQUEST.size, WANT.size, ITEM.size, MATCHED.size) == (40, 24, 64, 16)

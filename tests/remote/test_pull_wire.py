"""The bytes of pulls."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs.errors import ProtocolError
from tiers.remote.pull_wire import (
    ANSWER_BYTES,
    HEAD_BYTES,
    PULL,
    Pull,
    decode_answer_head,
    decode_head,
    decode_pull,
    decode_pulled,
    encode_pulled,
)
from tiers.transfers.other_machines import Cause, Pulled

KEYS = st.binary(min_size=16, max_size=16)
PULLS = st.builds(
    Pull,
    kind=st.just(PULL),
    number=st.integers(0, 2**64 - 1),
    namespace=KEYS,
    address=st.text(max_size=60),
    digests=st.lists(KEYS, min_size=1, max_size=9),
)


def decoded(data: bytes) -> Pull:
    head = decode_head(data[:HEAD_BYTES])
    assert head.rest_bytes == len(data) - HEAD_BYTES
    return decode_pull(head, data[HEAD_BYTES:])


@given(PULLS)
def test_a_pull_is_what_was_sent(pull: Pull) -> None:
    assert decoded(pull.encode()) == pull


@given(PULLS, st.sampled_from(Cause), st.text(max_size=2000), st.data())
def test_an_answer_is_what_was_sent_but_for_the_end_of_a_long_reason(
    pull: Pull, cause: Cause, reason: str, data: st.DataObject
) -> None:
    count = len(pull.digests)
    statuses = bytes(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    sent = encode_pulled(pull.number, Pulled(statuses, cause, reason))
    found, reason_bytes = decode_answer_head(sent[:ANSWER_BYTES], pull)
    assert len(sent) == ANSWER_BYTES + count + reason_bytes
    got = decode_pulled(found, sent[ANSWER_BYTES:], count)
    assert got[:2] == (statuses, cause)
    assert reason.startswith(got.reason.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert len(got.reason.encode()) >= min(len(reason.encode()), limits.MAX_PULL_REASON_BYTES - 3)


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES))
def test_any_bytes_are_a_head_or_refused(data: bytes) -> None:
    with suppress(ProtocolError):
        head = decode_head(data)
        assert 1 <= head.blocks <= limits.MAX_PULL_BLOCKS


@pytest.mark.parametrize(("at", "value"), [(0, 0), (4, 9), (7, 9), (8, 0), (10, 9), (12, 1)], ids=str)
def test_a_head_outside_of_its_limits_is_refused(at: int, value: int) -> None:
    data = bytearray(Pull(PULL, 1, bytes(16), "", [bytes(16)]).encode())
    data[at] = value
    with pytest.raises(ProtocolError):
        decode_head(bytes(data[:HEAD_BYTES]))


@pytest.mark.parametrize(
    ("at", "value"), [(0, 0), (4, 2), (8, 2), (16, 5), (21, 9), (22, 1), (24, 3)], ids=str
)
def test_an_answer_outside_of_its_limits_is_refused(at: int, value: int) -> None:
    pull = Pull(PULL, 1, bytes(16), "", [bytes(16)])
    data = bytearray(encode_pulled(1, Pulled(b"\0")))
    data[at] = value
    with pytest.raises(ProtocolError):
        decode_pulled(decode_answer_head(bytes(data[:ANSWER_BYTES]), pull)[0], bytes(data[ANSWER_BYTES:]), 1)


def test_sizes_are_those_of_the_page() -> None:
    assert (HEAD_BYTES, ANSWER_BYTES) == (40, 24)

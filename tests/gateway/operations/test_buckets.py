"""Buckets that come and go at the S3 endpoint, more often than the index has slots for readers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.gateway import Gateway, fails, gateway

ROUNDS = 300
"""LMDB's table of readers has 126 slots, and a removal has two look-ups fail."""
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    with gateway() as found:
        yield found
        assert not found.service.complaints()


@pytest.fixture(scope="module")
def s3(door: Gateway) -> Any:
    return door.client()


def test_buckets_are_made_and_removed_for_ever(door: Gateway, s3: Any) -> None:
    for n in range(ROUNDS):
        name = f"come-and-go-{n % 3}"
        s3.create_bucket(Bucket=name)
        s3.delete_bucket(Bucket=name)
    with door.service.client() as client:
        assert [entry.key for entry in client.list(".kvfs-s3/owners/")] == []
    assert s3.list_buckets()["Buckets"] == []


def test_requests_that_fail_do_not_use_anything_up(s3: Any) -> None:
    s3.create_bucket(Bucket="there")
    for _ in range(ROUNDS):
        fails(lambda: s3.delete_bucket(Bucket="missing"), "NoSuchBucket", 404)
        fails(lambda: s3.list_objects_v2(Bucket="missing"), "NoSuchBucket", 404)
        fails(lambda: s3.get_object(Bucket="missing", Key="k"), "NoSuchBucket", 404)
        fails(lambda: s3.put_object(Bucket="missing", Key="k", Body=b"x"), "NoSuchBucket", 404)
        fails(lambda: s3.get_object(Bucket="there", Key="k"), "NoSuchKey", 404)
    s3.delete_bucket(Bucket="there")

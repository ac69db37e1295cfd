"""What the name index keeps beside names over a reopen: buckets, ids that never repeat, meta."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvfs.errors import InvalidRequest, LimitExceeded, NotEmpty
from kvfs.index.names import NameIndex
from kvfs.index.rows import MAX_BUCKET_ID
from kvfs.limits import OBJECT_ID_RANGE
from tests.support.small_index import bucket, index, row

__all__ = ["index"]


def test_buckets_survive(tmp_path: Path) -> None:
    bound = bucket(b"a", class_="durable", namespace=bytes(range(16)), namespace_json=b"{}")
    with NameIndex.open(tmp_path) as index:
        index.put_bucket(bucket())
        index.put_bucket(bound)
        index.put(b"models", b"k", row())
        with pytest.raises(NotEmpty, match="'k'"):
            index.remove_bucket(b"models")
    with NameIndex.open(tmp_path) as index:
        assert index.buckets() == [bound, bucket()]
        assert index.get_bucket(b"a") == bound
        assert index.remove_bucket(b"a") == bound
        assert index.remove_bucket(b"a") is None
    with NameIndex.open(tmp_path) as index:
        assert index.buckets() == [bucket()]


def test_ids_never_repeat(tmp_path: Path) -> None:
    taken: set[int] = set()
    for clean in (True, False, True):
        index = NameIndex.open(tmp_path / "names")
        for n in (1, 5, OBJECT_ID_RANGE, OBJECT_ID_RANGE + 3, 1):
            first = index.next_ids(n)
            ids = set(range(first, first + n))
            assert not ids & taken
            assert 0 < first + n < 1 << 53
            taken |= ids
        if clean:
            index.close()
        else:
            index.environment._env.close()
    shutil.rmtree(tmp_path / "names")
    with NameIndex.open(tmp_path / "names") as index:
        index.skip_ids(max(taken))
        assert index.next_ids(1) > max(taken)
        with pytest.raises(InvalidRequest, match="0 object ids"):
            index.next_ids(0)


def test_bucket_ids_never_repeat(tmp_path: Path) -> None:
    with NameIndex.open(tmp_path / "names") as index:
        taken = [index.next_bucket_id() for _ in range(3)]
    with NameIndex.open(tmp_path / "names") as index:
        taken.append(index.next_bucket_id())
        assert sorted(set(taken)) == taken
        assert taken[0] > 0
        index.skip_bucket_ids(taken[-1] + 100)
        assert index.next_bucket_id() == taken[-1] + 101
        index.skip_bucket_ids(5)
        assert index.next_bucket_id() == taken[-1] + 102
        index.skip_bucket_ids(MAX_BUCKET_ID)
        with pytest.raises(LimitExceeded, match=str(MAX_BUCKET_ID)):
            index.next_bucket_id()


@pytest.mark.parametrize("bucket_id", [0, -1, MAX_BUCKET_ID + 1])
def test_a_bucket_id_out_of_range_is_named(index: NameIndex, bucket_id: int) -> None:
    with pytest.raises(InvalidRequest, match="bucket_id"):
        index.put_bucket(bucket(bucket_id=bucket_id))


def test_a_clean_close_gives_ids_back(tmp_path: Path) -> None:
    with NameIndex.open(tmp_path) as index:
        first = index.next_ids(1)
    with NameIndex.open(tmp_path) as index:
        assert index.next_ids(1) == first + 1


def test_meta(tmp_path: Path) -> None:
    with NameIndex.open(tmp_path) as index:
        assert index.get_meta(b"boot") is None
        index.put_meta(b"boot", b"1")
        with pytest.raises(InvalidRequest, match="format"):
            index.put_meta(b"format", b"")
    with NameIndex.open(tmp_path) as index:
        assert index.get_meta(b"boot") == b"1"

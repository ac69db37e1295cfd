"""The name index against a plain sorted dictionary, its formats, and what it does when full or foreign."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfs.errors import (
    Corrupt,
    CrossDevice,
    Exists,
    FormatMismatch,
    InvalidRequest,
    IsDirectory,
    LimitExceeded,
    NameTooLong,
    NoSpace,
    NotEmpty,
    NotFound,
)
from kvfs.index import environment
from kvfs.index.names import DIRECTORY, PINNED, BucketRow, ListEntry, NameIndex, NameRow
from kvfs.index.rows import LINK, MAX_BUCKET_ID, is_name_row
from kvfs.index.tree import NameScan
from kvfs.limits import (
    KIB,
    MAX_LINK_TARGET_BYTES,
    MAX_LIST_ENTRIES,
    MAX_USER_METADATA_BYTES,
    MIB,
    OBJECT_ID_RANGE,
)

BUCKETS = (b"b", b"bb", b"c")


def row(object_id: int = 1, **changes: Any) -> NameRow:
    plain = NameRow(object_id, object_id, 4096, 0o100644, 1000, 1000, 5, 6, 7, 0)
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[NameIndex]:
    with NameIndex.open(tmp_path / "names", map_size_bytes=MIB) as opened:
        yield opened


# --- the model ------------------------------------------------------------------------------------------

# Around the two cuts: with the bucket "b", keys of 509 and 1012 bytes are the first of their level.
short = st.lists(st.sampled_from([b"/", b"a", b"b", b"\x01", b"\xff", b"//"]), max_size=4).map(b"".join)
stems = st.sampled_from([b"", b"", b"", b"p" * 506, b"p" * 508, b"p" * 507 + b"/", b"p" * 508 + b"q" * 502])
texts = st.builds(lambda stem, middle, end: stem + middle + end, stems, short, short)
keys = texts.filter(bool)
buckets = st.sampled_from(BUCKETS)
delimiters = st.sampled_from([None, b"/", b"/", b"a", b"//", b"a/", b"/a", b"\xff", b"\xff\xff"])


def entries_of(names: list[bytes], prefix: bytes, delimiter: bytes | None) -> list[bytes]:
    """Every entry of a listing, straight from the definition."""
    entries = set()
    for name in names:
        if name.startswith(prefix):
            head, mark, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, b"", b"")
            entries.add(prefix + head + mark if delimiter else name)
    return sorted(entries)


class NamesAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="kvfs-names-"))
        self.index = NameIndex.open(self.path, map_size_bytes=256 * KIB)
        self.model: dict[tuple[bytes, bytes], NameRow] = {}
        self.serial = 0

    def teardown(self) -> None:
        self.index.close()
        shutil.rmtree(self.path)

    def names(self, bucket: bytes) -> list[bytes]:
        return sorted(key for owner, key in self.model if owner == bucket)

    @rule(bucket=buckets, key=keys, directory=st.booleans())
    def put(self, bucket: bytes, key: bytes, directory: bool) -> None:
        self.serial += 1
        value = row(self.serial, flags=DIRECTORY if directory else 0)
        self.index.put(bucket, key, value)
        self.model[bucket, key] = value

    @rule(bucket=buckets, stem=stems, tails=st.lists(short, max_size=12))
    def put_many(self, bucket: bytes, stem: bytes, tails: list[bytes]) -> None:
        for tail in tails:
            self.put(bucket, stem + b"a" + tail, False)

    @rule(bucket=buckets, key=keys)
    def remove(self, bucket: bytes, key: bytes) -> None:
        assert self.index.remove(bucket, key) == self.model.pop((bucket, key), None)

    @rule(data=st.data(), bucket=buckets, key=keys)
    def remove_many(self, data: st.DataObject, bucket: bytes, key: bytes) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True)) if self.model else []
        chosen += [(bucket, key)] if (bucket, key) not in chosen else []
        assert self.index.remove_many(chosen) == [self.model.pop(name, None) for name in chosen]

    @rule(data=st.data(), bucket=buckets, key=keys)
    def rename(self, data: st.DataObject, bucket: bytes, key: bytes) -> None:
        if not self.model:
            with pytest.raises(NotFound):
                self.index.rename(bucket, key, bucket, b"other")
            return
        source, replace = data.draw(st.sampled_from(sorted(self.model))), data.draw(st.booleans())
        others = {name: row for name, row in self.model.items() if name != source}
        replaced, moved = others.get((bucket, key)), self.model[source]
        if source != (bucket, key):
            is_directory = any(other == bucket and name.startswith(key + b"/") for other, name in others)
            if is_directory or (replaced is not None and not replace):
                with pytest.raises(IsDirectory if is_directory else Exists):
                    self.index.rename(*source, bucket, key, replace=replace)
                return
        self.model = {**others, (bucket, key): moved}
        assert self.index.rename(*source, bucket, key, replace=replace) == (moved, replaced)

    @rule(src=buckets, dst=buckets, old=texts, new=texts, limit=st.integers(0, 12))
    def rename_prefix(self, src: bytes, dst: bytes, old: bytes, new: bytes, limit: int) -> None:
        if (src, old) == (dst, new):
            return
        sources = [key for key in self.names(src) if key.startswith(old)]
        pairs = [(key, new + key[len(old) :]) for key in sources]
        after = {name: value for name, value in self.model.items() if name not in {(src, k) for k in sources}}
        if len(pairs) > limit:
            expected: type[Exception] | None = CrossDevice
        elif any(not 0 < len(key) <= 1024 for _, key in pairs):
            expected = InvalidRequest
        elif any((dst, key) in after and not after[dst, key].flags & DIRECTORY for _, key in pairs):
            expected = NotEmpty
        else:
            expected = None
        if expected:
            with pytest.raises(expected):
                self.index.rename_prefix(src, old, dst, new, limit=limit)
            return
        assert self.index.rename_prefix(src, old, dst, new, limit=limit) == pairs
        self.model = after | {(dst, key): self.model[src, source] for source, key in pairs}

    @rule(bucket=buckets, prefix=texts, after=texts, delimiter=delimiters, limit=st.integers(0, 5))
    def list_page(
        self, bucket: bytes, prefix: bytes, after: bytes, delimiter: bytes | None, limit: int
    ) -> None:
        expected = [n for n in entries_of(self.names(bucket), prefix, delimiter) if not after or n > after]
        page = self.index.list(bucket, prefix=prefix, after=after, delimiter=delimiter, limit=limit)
        assert [entry.name for entry in page.entries] == expected[:limit]
        assert page.truncated == (0 < limit < len(expected))

    @rule(bucket=buckets, prefix=st.sampled_from([b"", b"a", b"a/", b"p" * 506]), delimiter=delimiters)
    def list_all(self, bucket: bytes, prefix: bytes, delimiter: bytes | None) -> None:
        """Every page size gives the same entries in the same order, also where a page ends in a prefix."""
        expected = entries_of(self.names(bucket), prefix, delimiter)
        for limit in (1, 2, 7):
            found: list[ListEntry] = []
            truncated = True
            while truncated and len(found) <= len(expected):
                after = found[-1].name if found else b""
                page = self.index.list(bucket, prefix=prefix, after=after, delimiter=delimiter, limit=limit)
                found += page.entries
                truncated = page.truncated
            assert [entry.name for entry in found] == expected
            for name, value in found:
                rolled_up = bool(delimiter) and name.find(delimiter or b"", len(prefix)) >= 0
                assert value == (None if rolled_up else self.model[bucket, name])

    @rule(bucket=buckets, prefix=texts)
    def has_prefix(self, bucket: bytes, prefix: bytes) -> None:
        assert self.index.has_prefix(bucket, prefix) == any(k.startswith(prefix) for k in self.names(bucket))

    @rule(bucket=buckets, key=keys)
    def get(self, bucket: bytes, key: bytes) -> None:
        assert self.index.get(bucket, key) == self.model.get((bucket, key))

    @rule(serial=st.integers(0, 5))
    def prune(self, serial: int) -> None:
        kept = {name: value for name, value in self.model.items() if value.object_id % 6 != serial}
        seen = []

        def keep(bucket: bytes, key: bytes, data: bytes | None) -> bool:
            seen.append((bucket, key))
            assert data == self.model[bucket, key].encode()
            return (bucket, key) in kept

        assert self.index.prune(keep) == len(self.model) - len(kept)
        assert seen == sorted(self.model, key=lambda name: name[0] + b"\0" + name[1])
        self.model = kept

    @rule()
    def reopen(self) -> None:
        self.index.close()
        self.index = NameIndex.open(self.path, map_size_bytes=256 * KIB)

    @invariant()
    def has_the_models_names(self) -> None:
        assert {(bucket, key) for bucket, key, _ in self.index.encoded_rows()} == self.model.keys()


NamesAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestNamesAgainstModel = NamesAgainstModel.TestCase


@settings(max_examples=30, deadline=None)
@given(names=st.sets(keys, max_size=60), removed=st.sets(st.integers(0, 59)))
def test_order_of_short_and_long_names(
    names: set[bytes], removed: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with NameIndex.open(tmp_path_factory.mktemp("names"), map_size_bytes=256 * KIB) as index:
        for number, name in enumerate(sorted(names, key=hash)):
            index.put(b"b", name, row(number))
        left = sorted(names)
        for number in sorted(removed, reverse=True):
            if number < len(left):
                assert index.remove(b"b", left.pop(number)) is not None
        assert [entry.name for entry in index.list(b"b").entries] == left
        for name in left:
            index.remove(b"b", name)
        assert index.environment.read(lambda txn: txn.stat(index._tree.heads))["entries"] == 0
        assert index.environment.read(lambda txn: txn.stat(index._tree.tails))["entries"] <= 1


# --- single properties ----------------------------------------------------------------------------------


class Steps:
    """Counts how often a listing moves its cursor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("seek", "step"):
            monkeypatch.setattr(NameScan, name, self._counted(getattr(NameScan, name)))

    def _counted(self, method: Callable[..., bool]) -> Callable[..., bool]:
        def move(*args: object) -> bool:
            self.count += 1
            return method(*args)

        return move


def test_a_listing_costs_its_entries_and_not_its_keys(
    index: NameIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in range(20):
        for file in range(100):
            index.put(b"b", b"d%02d/%03d" % (directory, file), row())
    steps = Steps(monkeypatch)
    page = index.list(b"b", delimiter=b"/", limit=10)
    assert page.entries == [ListEntry(b"d%02d/" % number, None) for number in range(10)]
    assert page.truncated
    assert steps.count <= 11


def test_a_prefix_inside_a_common_prefix_is_skipped(index: NameIndex) -> None:
    for key in (b"a/b", b"a/d", b"b"):
        index.put(b"b", key, row())
    assert [e.name for e in index.list(b"b", after=b"a/c", delimiter=b"/").entries] == [b"b"]
    assert [e.name for e in index.list(b"b", after=b"a", delimiter=b"/").entries] == [b"a/", b"b"]
    assert [e.name for e in index.list(b"b", after=b"a/c").entries] == [b"a/d", b"b"]


def test_a_delimiter_of_the_highest_byte_is_skipped(index: NameIndex) -> None:
    for key in (b"a\xff\xffb", b"a\xff\xffc", b"b", b"\xff\xff", b"\xff\xffz"):
        index.put(b"b", key, row())
    index.put(b"c", b"k", row())
    listed = [entry.name for entry in index.list(b"b", delimiter=b"\xff\xff").entries]
    assert listed == [b"a\xff\xff", b"b", b"\xff\xff"]


def test_buckets_that_are_prefixes_of_each_other_stay_apart(index: NameIndex) -> None:
    index.put(b"a", b"z", row(1))
    index.put(b"ab", b"a", row(2))
    assert [entry.name for entry in index.list(b"a").entries] == [b"z"]
    assert not index.has_prefix(b"a", b"a")


def test_rename_onto_itself_keeps_the_row(index: NameIndex) -> None:
    index.put(b"b", b"k", row(3))
    assert index.rename(b"b", b"k", b"b", b"k") == (row(3), None)
    assert index.get(b"b", b"k") == row(3)
    assert [entry.name for entry in index.list(b"b").entries] == [b"k"]


def test_a_failed_rename_moves_nothing(index: NameIndex) -> None:
    index.put(b"b", b"from/a", row(1))
    index.put(b"b", b"from/b", row(2))
    index.put(b"b", b"to/b", row(3))
    with pytest.raises(NotEmpty, match="to/b"):
        index.rename_prefix(b"b", b"from/", b"b", b"to/", limit=10)
    with pytest.raises(CrossDevice, match="more than 1 keys"):
        index.rename_prefix(b"b", b"from/", b"b", b"elsewhere/", limit=1)
    with pytest.raises(NameTooLong, match="1024"):
        index.rename_prefix(b"b", b"from/", b"b", b"x" * 1024, limit=10)
    assert [entry.name for entry in index.list(b"b").entries] == [b"from/a", b"from/b", b"to/b"]


def test_a_directory_may_move_into_its_own_name(index: NameIndex) -> None:
    """Flat names allow what paths do not; the rows must not overwrite each other on the way."""
    for key in (b"a/a/x", b"a/x"):
        index.put(b"b", key, row(len(key)))
    assert index.rename_prefix(b"b", b"a/", b"b", b"", limit=10) == [(b"a/a/x", b"a/x"), (b"a/x", b"x")]
    assert index.get(b"b", b"a/x") == row(5)


@pytest.mark.parametrize(
    ("bucket", "key", "error", "words"),
    [
        (b"", b"k", InvalidRequest, "bucket name is empty"),
        (b"b" * 64, b"k", NameTooLong, "64 bytes, the limit is 63"),
        (b"b\0", b"k", InvalidRequest, "NUL"),
        (b"b", b"", InvalidRequest, "empty"),
        (b"b", b"k" * 1025, NameTooLong, "1025 bytes, the limit is 1024"),
        (b"b", b"k\0", InvalidRequest, "NUL"),
    ],
)
def test_bad_names_are_named(
    index: NameIndex, bucket: bytes, key: bytes, error: type[Exception], words: str
) -> None:
    for call in (index.get, index.remove, lambda b, k: index.put(b, k, row())):
        with pytest.raises(error, match=words):
            call(bucket, key)


def test_a_page_over_the_limit_is_refused(index: NameIndex) -> None:
    with pytest.raises(LimitExceeded, match=str(MAX_LIST_ENTRIES)):
        index.list(b"b", limit=MAX_LIST_ENTRIES + 1)


# --- buckets, meta, ids ---------------------------------------------------------------------------------


def bucket(name: bytes = b"models", **changes: Any) -> BucketRow:
    plain = BucketRow(name, 7, "cache", 0, 0, 0o755, 10, 11)
    return dataclasses.replace(plain, **changes)


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


# --- the file -------------------------------------------------------------------------------------------


def test_a_full_map_grows_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "MAX_NAME_MAP_BYTES", 512 * KIB)
    with NameIndex.open(tmp_path, map_size_bytes=64 * KIB) as index:
        large = row(user_metadata=bytes(4 * KIB))

        def fill() -> None:
            for number in range(1000):
                index.put(b"b", b"%04d" % number, large)

        with pytest.raises(NoSpace, match=str(512 * KIB)):
            fill()
        stored = len(list(index.encoded_rows()))
        assert 64 * KIB // len(large.encode()) < stored < 1000
        assert index.get(b"b", b"%04d" % (stored - 1)) == large


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "FORMAT_VERSION", 2)
    NameIndex.open(tmp_path).close()
    monkeypatch.undo()
    with pytest.raises(FormatMismatch, match="format 2, this is format 1"):
        NameIndex.open(tmp_path)


def test_a_foreign_file_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not an index" * 1000)
    with pytest.raises(Corrupt, match=str(tmp_path)):
        NameIndex.open(tmp_path)


def test_the_index_survives_an_abrupt_end(tmp_path: Path) -> None:
    index = NameIndex.open(tmp_path)
    index.put(b"b", b"k", row(9))
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    with NameIndex.open(tmp_path / "copy") as copy:
        assert copy.get(b"b", b"k") == row(9)
    index.close()
    index.close()


def test_bad_map_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="a map of 0 bytes"):
        NameIndex.open(tmp_path, map_size_bytes=0)


def test_lmdb_keys_are_as_long_as_the_format_says(index: NameIndex) -> None:
    assert index.environment._env.max_key_size() >= 511
    assert lmdb.version()[0] in (0, 1)


# --- rows -----------------------------------------------------------------------------------------------

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
digests = st.one_of(st.just(b""), st.binary(min_size=16, max_size=16))


targets = st.binary(min_size=1, max_size=99).map(lambda target: target.replace(b"\0", b"/"))


@given(
    st.builds(NameRow, u64, u64, u64, u32, u32, u32, i64, i64, u64, u32, digests, st.binary(max_size=99)),
    targets,
)
def test_name_rows_come_back(value: NameRow, target: bytes) -> None:
    """With the flag of a symbolic link, which has a target, and without."""
    plain = dataclasses.replace(value, flags=value.flags & ~LINK)
    link = dataclasses.replace(value, flags=value.flags | LINK, target=target, size_bytes=len(target))
    for each in (plain, link):
        assert NameRow.decode(each.encode()) == each
        assert is_name_row(each.encode())


@given(st.binary(max_size=300))
def test_a_quick_look_takes_what_decoding_takes(data: bytes) -> None:
    """Of rows that begin as one, and of any bytes."""
    for each in (data, row().encode()[:4] + data, b"\x01\x00\x00\x00\x10" + data):
        try:
            NameRow.decode(each)
        except Corrupt:
            assert not is_name_row(each)
        else:
            assert is_name_row(each)


@pytest.mark.parametrize(
    "target", [b"", b"a\0b", bytes(MAX_LINK_TARGET_BYTES + 1), b"n" * (MAX_LINK_TARGET_BYTES + 1)]
)
def test_no_row_has_a_target_that_no_link_can_have(target: bytes) -> None:
    link = row(flags=LINK, size_bytes=len(target), target=target)
    with pytest.raises(InvalidRequest, match="target"):
        link.encode()
    good = row(flags=LINK, size_bytes=3, target=b"abc").encode()
    with pytest.raises(Corrupt):
        NameRow.decode(good[:36] + len(target).to_bytes(8, "little") + good[44:-3] + target)


def test_only_links_have_targets_as_long_as_they_say() -> None:
    for changes in ({"target": b"abc"}, {"flags": LINK}, {"flags": LINK, "target": b"abc", "size_bytes": 4}):
        with pytest.raises(InvalidRequest, match="target"):
            row(**changes).encode()


def test_name_row_bytes() -> None:
    link = NameRow(1, 2, 3, 4, 5, 6, 7, -8, 9, LINK, b"", b"meta", b"../")
    assert link.encode()[4:8].hex() == "10000000"
    assert link.encode()[68:] == b"../meta"
    value = NameRow(1, 2, 3, 4, 5, 6, 7, -8, 9, PINNED | DIRECTORY, bytes(range(16)), b"meta")
    assert value.encode().hex() == (
        "01100000" "03000000" "04000000" "05000000" "06000000"
        "0100000000000000" "0200000000000000" "0300000000000000" "0900000000000000"
        "0700000000000000" "f8ffffffffffffff"
        "000102030405060708090a0b0c0d0e0f" "6d657461"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"uid": -1}, InvalidRequest, "NameRow.uid is -1"),
        ({"mtime_ns": 1 << 63}, InvalidRequest, "mtime_ns"),
        ({"digest": b"x"}, InvalidRequest, "digest has 1 bytes"),
        ({"user_metadata": bytes(MAX_USER_METADATA_BYTES + 1)}, LimitExceeded, "65536"),
    ],
)
def test_rows_out_of_range_are_named(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        row(**changes).encode()


@pytest.mark.parametrize("damage", [b"", b"\x02", b"\x01\x05", b"\x01\x10\x00\x01"])
def test_damaged_rows_are_corrupt(damage: bytes) -> None:
    good = row().encode()
    with pytest.raises(Corrupt, match="name row"):
        NameRow.decode(damage + good[len(damage) :] if damage else good[:-1])
    with pytest.raises(Corrupt, match="'models'"):
        BucketRow.decode(b"models", damage[:1] or b"short")


def test_bucket_rows_are_checked() -> None:
    with pytest.raises(InvalidRequest, match="'warm'"):
        bucket(class_="warm").encode()
    with pytest.raises(InvalidRequest, match="3 bytes"):
        bucket(namespace=b"abc").encode()
    with pytest.raises(InvalidRequest, match="gid"):
        bucket(gid=1 << 32).encode()

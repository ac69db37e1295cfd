"""The names of the index against a plain sorted dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfs.errors import CrossDevice, Exists, InvalidRequest, IsDirectory, NotEmpty, NotFound
from kvfs.index.names import DIRECTORY, ListEntry, NameIndex, NameRow
from kvfs.limits import KIB
from tests.support.small_index import row

BUCKETS = (b"b", b"bb", b"c")

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

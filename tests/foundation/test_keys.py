"""Namespaces and prefix hashes: the vectors of docs/keys.md, an independent implementation, and properties."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench import keys as bench_keys
from kvfs._native.hash import hashing
from kvfs.errors import DeviceMissing, InvalidNamespace, InvalidRequest, LimitExceeded
from kvfs.keys import (
    Namespace,
    block_name,
    key_at,
    parse_block_name,
    prefix_hashes,
    split_keys,
    tail_hash,
    xxh3_64,
)
from kvfs.limits import MAX_BLOCK_TOKENS, MAX_EXTRA_BYTES, MAX_HASH_TOKENS, MAX_NAMESPACE_BYTES

DESCRIPTION: dict[str, Any] = {
    "model": "example/model",
    "revision": "main@1",
    "dtype": "bfloat16",
    "layout": "LKTHD",
    "block_tokens": 4,
    "tensor_shards": 2,
    "tensor_rank": 1,
    "pipeline_shards": 1,
    "pipeline_rank": 0,
    "lora": "",
    "salt": "",
    "hash": "sha256",
    "extra": {},
}
PLAIN = Namespace.from_mapping(DESCRIPTION)
HIGH = 2**32 - 1

# --- an independent implementation, from docs/keys.md alone --------------------------------------------------


def reference_string(text: str) -> str:
    out = []
    for unit in struct.iter_unpack(">H", text.encode("utf-16-be")):
        code = unit[0]
        if code in (0x22, 0x5C):
            out.append("\\" + chr(code))
        else:
            out.append(chr(code) if code < 0x7F else f"\\u{code:04x}")
    return '"' + "".join(out) + '"'


def reference_json(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{reference_json(k)}:{reference_json(value[k])}" for k in sorted(value)) + "}"
    return reference_string(value) if isinstance(value, str) else str(value)


def reference_hash(algorithm: str, message: bytes) -> bytes:
    if algorithm == "sha256":
        return hashlib.sha256(message).digest()[:16]
    return xxhash.xxh3_128_digest(message)


def reference_namespace(description: dict[str, Any]) -> tuple[bytes, bytes]:
    canonical = reference_json({"extra": {}} | description).encode("ascii")
    return canonical, hashlib.sha256(b"kvfs namespace 1" + canonical).digest()[:16]


def reference_chain(
    description: dict[str, Any],
    tokens: list[int],
    parent: bytes | None = None,
    extra: list[bytes] | None = None,
) -> list[bytes]:
    size = description["block_tokens"]
    before = reference_namespace(description)[1] if parent is None else parent
    hashes = []
    for number in range(len(tokens) // size):
        words = b"".join(token.to_bytes(4, "little") for token in tokens[number * size : (number + 1) * size])
        before = reference_hash(description["hash"], before + words + (extra[number] if extra else b""))
        hashes.append(before)
    return hashes


def reference_tail(
    description: dict[str, Any], tokens: list[int], parent: bytes, extra: bytes = b""
) -> bytes:
    words = b"".join(token.to_bytes(4, "little") for token in tokens)
    message = b"kvfs tail hash 1" + parent + len(tokens).to_bytes(4, "little") + words + extra
    return reference_hash(description["hash"], message)


# --- the vectors ---------------------------------------------------------------------------------------------


def specification(part: str) -> Any:
    """A JSON block of the page."""
    page = (Path(__file__).parents[2] / "docs/keys.md").read_text(encoding="utf-8")
    found = re.search(rf"```json {part}\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_vectors_start_from_this_description() -> None:
    assert specification("base") == DESCRIPTION


@pytest.mark.parametrize("vector", specification("vectors"), ids=lambda vector: vector["name"])
def test_vectors_of_the_specification(vector: dict[str, Any]) -> None:
    description = DESCRIPTION | vector["changes"]
    namespace = Namespace.from_mapping(description)
    tokens = vector["tokens"]
    parent = bytes.fromhex(vector["parent"]) if vector["parent"] else None
    extra = [bytes.fromhex(each) for each in vector["extra"]] if vector["extra"] else None
    hashes = [bytes.fromhex(each) for each in vector["hashes"]]
    whole = len(tokens) - len(tokens) % namespace.block_tokens
    before_tail = hashes[-1] if hashes else parent or namespace.digest

    assert namespace.canonical.decode() == vector["canonical"]
    assert namespace.digest.hex() == vector["digest"]
    assert reference_namespace(description) == (namespace.canonical, namespace.digest)
    assert prefix_hashes(namespace, tokens, parent=parent, extra=extra) == b"".join(hashes)
    assert reference_chain(description, tokens, parent, extra) == hashes
    if vector["tail"]:
        assert tail_hash(namespace, tokens[whole:], parent=before_tail).hex() == vector["tail"]
        assert reference_tail(description, tokens[whole:], before_tail).hex() == vector["tail"]


# --- properties ----------------------------------------------------------------------------------------------

token = st.one_of(
    st.integers(0, 200_000), st.integers(0, HIGH), st.sampled_from([0, 2**15, 2**16, 2**31, HIGH])
)
algorithms = st.sampled_from(["sha256", "xxh3_128"])
printable = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
namespaces = st.builds(
    lambda **fields: Namespace(**fields, tensor_rank=0, pipeline_rank=0),
    model=printable.filter(bool),
    revision=printable.filter(bool),
    dtype=st.sampled_from(["bfloat16", "float16", "float8_e4m3"]),
    layout=st.sampled_from(["LKTHD", "LKHTD", "KLTHD", "LTC"]),
    block_tokens=st.integers(1, 40),
    tensor_shards=st.integers(1, 3),
    pipeline_shards=st.integers(1, 3),
    lora=printable,
    salt=printable,
    hash=algorithms,
    extra=st.dictionaries(st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,5}", fullmatch=True), printable, max_size=3),
)


@given(namespace=namespaces, tokens=st.lists(token, max_size=200), data=st.data())
def test_equals_the_independent_implementation(
    namespace: Namespace, tokens: list[int], data: st.DataObject
) -> None:
    description = namespace.as_mapping()
    assert reference_namespace(description) == (namespace.canonical, namespace.digest)
    blocks = len(tokens) // namespace.block_tokens
    extra = data.draw(st.none() | st.lists(st.binary(max_size=9), min_size=blocks, max_size=blocks))
    parent = data.draw(st.none() | st.binary(min_size=16, max_size=16))
    joined = prefix_hashes(namespace, tokens, parent=parent, extra=extra)
    hashes = reference_chain(description, tokens, parent, extra)
    assert split_keys(joined) == [key_at(joined, index) for index in range(blocks)] == hashes
    if rest := tokens[blocks * namespace.block_tokens :]:
        before = hashes[-1] if hashes else parent or namespace.digest
        assert tail_hash(namespace, rest, parent=before, extra=b"x") == reference_tail(
            description, rest, before, b"x"
        )


@given(namespace=namespaces, tokens=st.lists(token, max_size=120), cut=st.integers(0, 120))
def test_a_continued_chain_equals_one_call(namespace: Namespace, tokens: list[int], cut: int) -> None:
    whole = prefix_hashes(namespace, tokens)
    cut -= cut % namespace.block_tokens
    first = prefix_hashes(namespace, tokens[:cut])
    parent = first[-16:] or None
    assert first + prefix_hashes(namespace, tokens[cut:], parent=parent) == whole


@given(namespace=namespaces, tokens=st.lists(token, min_size=1, max_size=120), data=st.data())
def test_every_token_matters(namespace: Namespace, tokens: list[int], data: st.DataObject) -> None:
    """A changed token changes its block and all later ones, and none before."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] ^ 1 << data.draw(st.integers(0, 31)), *tokens[at + 1 :]]
    before, after = (split_keys(prefix_hashes(namespace, each)) for each in (tokens, changed))
    same = at // namespace.block_tokens
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


@given(first=namespaces, second=namespaces, tokens=st.lists(token, min_size=40, max_size=80))
def test_namespaces_never_meet(first: Namespace, second: Namespace, tokens: list[int]) -> None:
    assume(first != second)
    assert first.digest != second.digest
    assert not set(split_keys(prefix_hashes(first, tokens))) & set(split_keys(prefix_hashes(second, tokens)))


def test_every_field_separates() -> None:
    others = {
        "model": "example/other", "revision": "main@2", "dtype": "float16", "layout": "LKHTD", "block_tokens": 8,
        "tensor_shards": 4, "tensor_rank": 0, "pipeline_shards": 2, "lora": "a@1", "salt": "b", "hash": "xxh3_128",
        "extra": {"scales": "per block"},
    }  # fmt: skip
    spaces = [PLAIN, *(Namespace.from_mapping(DESCRIPTION | {name: value}) for name, value in others.items())]
    spaces.append(Namespace.from_mapping(DESCRIPTION | {"pipeline_shards": 2, "pipeline_rank": 1}))
    assert len({space.digest for space in spaces}) == len(spaces)
    tokens = list(range(8))
    assert len({prefix_hashes(space, tokens)[:16] for space in spaces}) == len(spaces)


@given(
    tokens=st.lists(st.integers(0, 2**15 - 1), max_size=700), algorithm=algorithms, size=st.integers(1, 600)
)
def test_all_widths_hash_alike(tokens: list[int], algorithm: str, size: int) -> None:
    namespace = replace(PLAIN, hash=algorithm, block_tokens=size)
    expected = prefix_hashes(namespace, tokens)
    for code in "hHiIlLqQ":
        assert prefix_hashes(namespace, array(code, tokens)) == expected
    for width in (np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        assert prefix_hashes(namespace, np.array(tokens, dtype=width)) == expected


@given(tokens=st.lists(token, min_size=1, max_size=40), algorithm=algorithms, extra=st.binary(max_size=40))
def test_a_tail_is_no_whole_block(tokens: list[int], algorithm: str, extra: bytes) -> None:
    """Also where a whole block's bytes are those of a tail with its extra, or of a shorter block."""
    namespace = replace(PLAIN, hash=algorithm, block_tokens=len(tokens) + 1)
    whole = replace(PLAIN, hash=algorithm, block_tokens=len(tokens))
    parent = bytes(16)
    seen = {
        tail_hash(namespace, tokens, parent=parent),
        tail_hash(namespace, tokens, parent=parent, extra=b"\0\0\0\0"),
        prefix_hashes(whole, tokens, parent=parent),
        prefix_hashes(namespace, [*tokens, 0], parent=parent),
        prefix_hashes(namespace, [*tokens, 0], parent=parent, extra=[b"x" + extra]),
    }
    assert len(seen) == 5


@settings(max_examples=20)
@given(size=st.sampled_from([1, 3, 1007, 1008, 1020, 1024, 1025, 2047, 5000]), extra=st.integers(0, 9000))
def test_long_blocks_and_extras(size: int, extra: int) -> None:
    """Messages that end on, before and after every edge of the buffer."""
    for algorithm in ("sha256", "xxh3_128"):
        description = DESCRIPTION | {"block_tokens": size, "hash": algorithm}
        tokens = array("q", range(size))
        extras = [bytes(extra)]
        hashed = prefix_hashes(Namespace.from_mapping(description), tokens, extra=extras)
        assert [hashed] == reference_chain(description, list(tokens), None, extras)


# --- SHA-256 -------------------------------------------------------------------------------------------------


def engines() -> list[int]:
    return [hashing.PORTABLE] + [hashing.SHA_NI] * (hashing.sha256_engine() == hashing.SHA_NI)


@pytest.mark.parametrize("engine", engines())
def test_sha256_of_every_length(engine: int) -> None:
    data = bytes(np.random.default_rng(1).integers(0, 256, 20_000, dtype=np.uint8))
    for size in [*range(300), *range(4020, 4200), *range(8150, 8260), 20_000]:
        assert hashing.sha256(data[:size], engine=engine) == hashlib.sha256(data[:size]).digest()


def test_both_engines_give_the_same_chain() -> None:
    tokens = array("I", range(4096))
    chains = {
        hashing.hash_chain(
            tokens, bytes(16), None, algorithm=hashing.SHA256, block_tokens=16, tail=False, engine=engine
        )
        for engine in engines()
    }
    assert len(chains) == 1


@pytest.mark.skipif(hashing.sha256_engine() == hashing.SHA_NI, reason="this processor has the SHA extensions")
def test_an_engine_that_is_not_here_is_refused() -> None:
    with pytest.raises(DeviceMissing):
        hashing.sha256(b"", engine=hashing.SHA_NI)


@given(data=st.binary(max_size=3000))
def test_xxh3_64(data: bytes) -> None:
    assert xxh3_64(data) == xxhash.xxh3_64_intdigest(data)


# --- bad tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [list, *(lambda t, c=code: np.array(t, dtype=c) for code in ("i2", "i4", "i8"))]
)
@pytest.mark.parametrize("at", [0, 3, 4, 1023, 1024, 4099])
def test_a_negative_token_is_named(kind: Any, at: int) -> None:
    tokens = [7] * 4100
    tokens[at] = -5
    with pytest.raises(InvalidRequest, match=f"token {at} is -5, outside 0 to {HIGH}"):
        prefix_hashes(PLAIN, kind(tokens))


@pytest.mark.parametrize("code", ["i8", "u8"])
def test_a_token_over_32_bits_is_named(code: str) -> None:
    tokens = np.array([1, HIGH, HIGH + 1, 4], dtype=code)
    with pytest.raises(InvalidRequest, match=f"token 2 is {HIGH + 1}"):
        prefix_hashes(PLAIN, tokens)
    with pytest.raises(InvalidRequest, match=f"token 0 is {HIGH + 1}"):
        tail_hash(PLAIN, tokens[2:3])
    assert len(prefix_hashes(PLAIN, tokens[[0, 1, 0, 1]])) == 16


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1, 2, "x", 4], "token 2 is 'x', not an integer"),
        ([1, 2.0, 3, 4], "token 1 is 2.0, not an integer"),
        (b"1234", "item type 'B'"),
        (bytearray(16), "item type 'B'"),
        (np.zeros(4, dtype=np.float32), "item type 'f'"),
        (np.zeros(4, dtype=">u4"), "item type '>I'"),
        (np.zeros((4, 4), dtype=np.uint32), "2 dimensions"),
        (np.zeros(16, dtype=np.uint32)[::2], "not contiguous"),
        ({1, 2}, "a set, neither a buffer"),
        (None, "a NoneType"),
    ],
)
def test_tokens_that_are_none(tokens: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        prefix_hashes(PLAIN, tokens)


def test_other_bad_arguments() -> None:
    tokens = array("I", range(9))
    with pytest.raises(InvalidRequest, match="parent hash has 15 bytes, not 16"):
        prefix_hashes(PLAIN, tokens, parent=bytes(15))
    with pytest.raises(InvalidRequest, match="parent hash is a str"):
        prefix_hashes(PLAIN, tokens, parent="x" * 16)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="extra has 1 entries for 2 blocks"):
        prefix_hashes(PLAIN, tokens, extra=[b""])
    with pytest.raises(InvalidRequest, match="extra holds a str"):
        prefix_hashes(PLAIN, tokens, extra=[b"", "x"])  # type: ignore[list-item]
    with pytest.raises(LimitExceeded, match=str(MAX_EXTRA_BYTES)):
        prefix_hashes(PLAIN, tokens, extra=[None, bytes(MAX_EXTRA_BYTES + 1)])
    for count in (0, 4):
        with pytest.raises(InvalidRequest, match=f"1 to 3 tokens in this namespace, not {count}"):
            tail_hash(PLAIN, tokens[:count])
    with pytest.raises(LimitExceeded, match=str(MAX_HASH_TOKENS)):
        prefix_hashes(PLAIN, np.zeros(MAX_HASH_TOKENS + 1, dtype=np.uint16))


def test_missing_extras_are_empty() -> None:
    tokens = array("I", range(8))
    plain = prefix_hashes(PLAIN, tokens)
    assert prefix_hashes(PLAIN, tokens, extra=[None, b""]) == plain
    assert prefix_hashes(PLAIN, tokens, extra=[None, b"x"])[:16] == plain[:16]


# --- namespaces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "half"}, "field dtype is 'half', not one of bfloat16"),
        ({"layout": "NHD"}, "field layout is 'NHD', not the axes LKTHD or LTC"),
        ({"layout": "LLTHD"}, "layout"),
        ({"layout": ["L"]}, "layout"),
        ({"hash": "md5"}, "field hash is 'md5', not one of sha256, xxh3_128"),
        ({"block_tokens": 0}, "block_tokens is 0, not a number from 1"),
        ({"block_tokens": MAX_BLOCK_TOKENS + 1}, "block_tokens"),
        ({"block_tokens": 4.0}, "block_tokens is 4.0"),
        ({"tensor_shards": True}, "tensor_shards is True"),
        ({"tensor_rank": 2}, "tensor_rank is 2, not a number from 0 to 1"),
        ({"pipeline_rank": -1}, "pipeline_rank is -1"),
        ({"model": ""}, "field model is empty"),
        ({"revision": None}, "field revision is None"),
        ({"salt": "a\nb"}, "salt holds '\\\\n'"),
        ({"lora": "\ud800"}, "lora holds"),
        ({"extra": {"Upper": "x"}}, "name 'Upper' in namespace field extra"),
        ({"extra": {"a": 1}}, "field extra.a is 1, not a string"),
        ({"extra": []}, "field extra is"),
        ({"extra": {"a": "x" * MAX_NAMESPACE_BYTES}}, f"limit is {MAX_NAMESPACE_BYTES}"),
        ({"heads": 8}, "field 'heads' is unknown"),
    ],
)
def test_what_is_unknown_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidNamespace, match=words):
        Namespace.from_mapping(DESCRIPTION | changes)


@pytest.mark.parametrize("field", sorted(DESCRIPTION.keys() - {"extra"}))
def test_what_is_missing_is_named(field: str) -> None:
    short = {name: value for name, value in DESCRIPTION.items() if name != field}
    with pytest.raises(InvalidNamespace, match=f"field {field} is missing"):
        Namespace.from_mapping(short)


@given(namespace=namespaces)
def test_a_namespace_comes_back(namespace: Namespace) -> None:
    loose = json.dumps(namespace.as_mapping(), indent=2, ensure_ascii=False)
    for text in (namespace.canonical, loose, loose.encode()):
        again = Namespace.from_json(text)
        assert again == namespace
        assert hash(again) == hash(namespace)
    assert namespace != namespace.digest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "no JSON"),
        (b"[]", "no JSON object"),
        (b"\xff", "no JSON"),
        (b"[" * 60_000, "no JSON"),
        (b'{"model":"a","model":"b"}', "'model' is given twice"),
        (b" " * (MAX_NAMESPACE_BYTES + 1), "limit"),
    ],
)
def test_bad_json_is_refused(text: bytes, words: str) -> None:
    with pytest.raises(InvalidNamespace, match=words):
        Namespace.from_json(text)


def test_a_namespace_cannot_change() -> None:
    extra = {"a": "b"}
    namespace = replace(PLAIN, extra=extra)
    extra["a"] = "c"
    assert namespace.extra["a"] == "b"
    with pytest.raises(TypeError):
        namespace.extra["a"] = "c"  # type: ignore[index]


# --- block names ---------------------------------------------------------------------------------------------


@given(digest=st.binary(min_size=16, max_size=16))
def test_block_names(digest: bytes) -> None:
    name = block_name(digest)
    assert name == b"kv/" + digest.hex()[:2].encode() + b"/" + digest.hex().encode()
    assert parse_block_name(name) == digest


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"kv/00/" + b"0" * 31,
        b"kv/00/" + b"0" * 33,
        b"kv/01/" + b"0" * 32,
        b"kv/00/" + b"0" * 31 + b"g",
        b"kv/0A/0A" + b"0" * 30,
        b"kv/00/" + b"0" * 32 + b"\n",
        b"xkv/00/" + b"0" * 32,
    ],
)
def test_other_names_are_no_blocks(name: bytes) -> None:
    assert parse_block_name(name) is None


def test_a_short_hash_has_no_name() -> None:
    with pytest.raises(InvalidRequest, match="15 bytes, not 16"):
        block_name(bytes(15))


# --- the figures ---------------------------------------------------------------------------------------------


def test_figures_have_their_form() -> None:
    """Ratios are for `kvfs bench`; a loaded machine must not fail a test for them."""
    for figure in bench_keys.measure(seconds=0.01):
        assert figure.keys() == {"name", "value", "unit", "baseline", "ratio", "p99", "baseline_p99"}
        assert figure["p99"] >= figure["value"]
        assert figure["ratio"] > 0

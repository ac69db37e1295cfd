"""aws-chunked bodies and checksums: the examples of AWS, any cut of the stream, and everything that must be refused."""

from __future__ import annotations

import hmac
import zlib
from base64 import b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.auth.sigv4 import PayloadMode, Verified, signing_key
from gateway.call.aws_chunked import ChunkedDecoder, encoded_bytes_limit
from gateway.protocol import checksums
from gateway.protocol.checksums import Algorithm, Checksum, ChecksumType
from gateway.protocol.errors import S3Error
from kvfs.limits import MIN_AWS_CHUNK_BYTES
from tests.support.s3 import CREDENTIAL, request

KIB = 1 << 10
CRC = "x-amz-checksum-crc32c"
NO_TRAILERS: frozenset[str] = frozenset()
SCOPE = "20130524/us-east-1/s3/aws4_request"
TIME = "20130524T000000Z"
KEY = signing_key(CREDENTIAL.secret, "20130524", "us-east-1")

UNSIGNED = PayloadMode.STREAMING_UNSIGNED_TRAILER
SIGNED = PayloadMode.STREAMING_SIGNED
SIGNED_TRAILER = PayloadMode.STREAMING_SIGNED_TRAILER
MODES = [UNSIGNED, SIGNED, SIGNED_TRAILER]


def verified(mode: PayloadMode, seed: str = "0" * 64) -> Verified:
    return Verified(CREDENTIAL, mode, None, seed, KEY, TIME, SCOPE, False)


def encode(
    mode: PayloadMode, chunks: Sequence[bytes], trailers: dict[str, str], seed: str = "0" * 64
) -> bytes:
    """An aws-chunked body, made as the S3 API Reference says."""
    previous = seed

    def sign(kind: str, what: str) -> str:
        nonlocal previous
        text = "\n".join([kind, TIME, SCOPE, previous, what])
        previous = hmac.new(KEY, text.encode(), "sha256").hexdigest()
        return previous

    out = b""
    for chunk in [*chunks, b""]:
        signature = ""
        if mode.signs_chunks:
            digests = f"{sha256(b'').hexdigest()}\n{sha256(chunk).hexdigest()}"
            signature = ";chunk-signature=" + sign("AWS4-HMAC-SHA256-PAYLOAD", digests)
        out += f"{len(chunk):x}{signature}\r\n".encode() + chunk + (b"\r\n" if chunk else b"")
    if mode.has_trailer:
        out += "".join(f"{name}:{value}\r\n" for name, value in trailers.items()).encode()
        if mode.signs_chunks:
            canonical = "".join(f"{name}:{value}\n" for name, value in trailers.items())
            signature = sign("AWS4-HMAC-SHA256-TRAILER", sha256(canonical.encode()).hexdigest())
            out += f"x-amz-trailer-signature:{signature}\r\n".encode()
    return out + b"\r\n"


def decode(decoder: ChunkedDecoder, pieces: Sequence[bytes]) -> tuple[bytes, dict[str, str]]:
    payload = b"".join(bytes(view) for piece in pieces for view in decoder.feed(memoryview(piece)))
    return payload, decoder.finish()


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(ends)]


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(S3Error) as caught:
        call()
    return caught.value.code


# --- the examples of the S3 API Reference ----------------------------------------------------------------------
EXAMPLE = b"a" * (65 * KIB)
SEED = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
SIGNATURES = [
    "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
    "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
    "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
]
TRAILER_SEED = "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e"
TRAILER_SIGNATURES = [
    "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
    "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
    "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
]
TRAILER = (
    f"{CRC}:sOO8/Q==\r\n"
    "x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n"
)


def example(signatures: Sequence[str], trailer: str = "") -> bytes:
    out = b""
    for chunk, signature in zip((EXAMPLE[: 64 * KIB], EXAMPLE[64 * KIB :], b""), signatures, strict=True):
        out += f"{len(chunk):x};chunk-signature={signature}\r\n".encode() + chunk
        out += b"\r\n" if chunk else b""
    return out + trailer.encode() + b"\r\n"


def test_example_with_signed_chunks() -> None:
    body = example(SIGNATURES)
    decoder = ChunkedDecoder(verified(SIGNED, SEED), len(EXAMPLE), NO_TRAILERS)
    assert decode(decoder, [body]) == (EXAMPLE, {})
    assert encode(SIGNED, [EXAMPLE[: 64 * KIB], EXAMPLE[64 * KIB :]], {}, SEED) == body


def test_example_with_a_signed_trailer() -> None:
    body = example(TRAILER_SIGNATURES, TRAILER)
    decoder = ChunkedDecoder(verified(SIGNED_TRAILER, TRAILER_SEED), len(EXAMPLE), frozenset({CRC}))
    assert decode(decoder, [body]) == (EXAMPLE, {CRC: "sOO8/Q=="})
    over = checksums.digester(Algorithm.CRC32C)
    over.update(EXAMPLE)
    assert checksums.parse(Algorithm.CRC32C, "sOO8/Q==") == over.digest()


# --- any stream, cut anywhere ------------------------------------------------------------------------------------
@st.composite
def bodies(draw: st.DrawFn) -> tuple[PayloadMode, list[bytes], dict[str, str], bytes]:
    mode = draw(st.sampled_from(MODES))
    sizes = draw(st.lists(st.integers(MIN_AWS_CHUNK_BYTES, MIN_AWS_CHUNK_BYTES + 300), max_size=3))
    sizes += draw(st.lists(st.integers(1, 600), max_size=1))
    chunks = [bytes([draw(st.integers(0, 255))]) * size for size in sizes]
    trailers = {CRC: "sOO8/Q=="} if mode.has_trailer and draw(st.booleans()) else {}
    return mode, chunks, trailers, encode(mode, chunks, trailers)


@settings(max_examples=200, deadline=None)
@given(bodies(), st.lists(st.integers(0, 1 << 20), max_size=12))
def test_a_stream_decodes_alike_however_it_is_cut(
    body: tuple[PayloadMode, list[bytes], dict[str, str], bytes], places: list[int]
) -> None:
    mode, chunks, trailers, data = body
    payload = b"".join(chunks)
    decoder = ChunkedDecoder(verified(mode), len(payload), frozenset(trailers))
    assert decode(decoder, cut(data, places)) == (payload, trailers)
    assert decoder.complete
    assert len(data) <= encoded_bytes_limit(len(payload))
    second = ChunkedDecoder(verified(mode), len(payload), frozenset(trailers))
    compacted = b""
    for piece in cut(data, places):
        buffer = bytearray(piece)
        compacted += buffer[: second.compact(memoryview(buffer))]
    assert compacted == payload
    assert second.finish() == trailers


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_comes_byte_by_byte(mode: PayloadMode) -> None:
    trailers = {CRC: "sOO8/Q=="} if mode.has_trailer else {}
    data = encode(mode, [b"x" * 100], trailers)
    decoder = ChunkedDecoder(verified(mode), 100, frozenset(trailers))
    assert decode(decoder, [bytes([byte]) for byte in data]) == (b"x" * 100, trailers)


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_ends_early_is_incomplete_at_every_byte(mode: PayloadMode) -> None:
    trailers = {CRC: "sOO8/Q=="} if mode.has_trailer else {}
    data = encode(mode, [b"x" * 20], trailers)
    for length in range(len(data)):
        decoder = ChunkedDecoder(verified(mode), 20, frozenset(trailers))
        decoder.feed(memoryview(data)[:length])
        assert code_of(decoder.finish) == "IncompleteBody"
        assert not decoder.complete


@settings(max_examples=300, deadline=None)
@given(bodies(), st.data())
def test_a_changed_byte_is_refused_or_is_payload_of_an_unsigned_stream(
    body: tuple[PayloadMode, list[bytes], dict[str, str], bytes], data: st.DataObject
) -> None:
    mode, chunks, trailers, encoded = body
    at = data.draw(st.integers(0, len(encoded) - 1))
    changed = bytearray(encoded)
    changed[at] ^= data.draw(st.integers(1, 255))
    payload = b"".join(chunks)
    decoder = ChunkedDecoder(verified(mode), len(payload), frozenset(trailers))
    try:
        found = decode(decoder, [bytes(changed)])
    except S3Error:
        return
    if mode.signs_chunks:
        # Names of trailers and sizes are the same in capitals.
        assert found == (payload, trailers)
        assert bytes(changed).lower() == encoded.lower()
    else:
        assert len(found[0]) == len(payload)
        assert found[1].keys() == trailers.keys()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(MODES), st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 60))
def test_any_bytes_are_decoded_or_refused(mode: PayloadMode, pieces: list[bytes], decoded: int) -> None:
    decoder = ChunkedDecoder(verified(mode), decoded, NO_TRAILERS)
    try:
        payload, _ = decode(decoder, pieces)
    except S3Error as error:
        refused = error
    else:
        assert len(payload) == decoded
        return
    assert 400 <= refused.status < 500


# --- refusals ----------------------------------------------------------------------------------------------------
def refused(
    data: bytes, decoded: int, mode: PayloadMode = UNSIGNED, names: frozenset[str] = NO_TRAILERS
) -> str:
    return code_of(lambda: decode(ChunkedDecoder(verified(mode), decoded, names), [data]))


SHORT = b"%x\r\n" % (MIN_AWS_CHUNK_BYTES - 1) + bytes(MIN_AWS_CHUNK_BYTES - 1) + b"\r\n"


@pytest.mark.parametrize(
    ("data", "decoded", "code"),
    [
        (b"3\r\nabc\r\n0\r\n\r\n", 2, "InvalidRequest"),
        (b"3\r\nabc\r\n0\r\n\r\n", 4, "IncompleteBody"),
        (b"3\r\nabc\r\n3\r\nabc\r\n0\r\n\r\n", 6, "InvalidChunkSizeError"),
        (SHORT + b"1\r\na\r\n0\r\n\r\n", MIN_AWS_CHUNK_BYTES, "InvalidChunkSizeError"),
        (b"3\nabc\n0\n\n", 3, "IncompleteBody"),
        (b"3\nabc\r\n0\r\n\r\n", 3, "InvalidRequest"),
        (b"3\r\nabcd\r\n0\r\n\r\n", 3, "InvalidRequest"),
        (b"3\r\nab\r\n0\r\n\r\n", 3, "InvalidRequest"),
        (b"3;name=value\r\nabc\r\n0\r\n\r\n", 3, "InvalidRequest"),
        (b"3;chunk-signature=" + b"0" * 64 + b"\r\nabc\r\n0\r\n\r\n", 3, "InvalidRequest"),
        (b"+3\r\nabc\r\n0\r\n\r\n", 3, "InvalidRequest"),
        (b"0x3\r\nabc\r\n0\r\n\r\n", 3, "InvalidRequest"),
        (b" 3\r\nabc\r\n0\r\n\r\n", 3, "InvalidRequest"),
        (b"-1\r\nabc\r\n0\r\n\r\n", 3, "InvalidRequest"),
        (b"\r\n", 3, "InvalidRequest"),
        (b"f" * 17 + b"\r\n", 3, "InvalidRequest"),
        (b"f" * 16 + b"\r\n", 3, "InvalidRequest"),
        (b"0" * 300, 3, "InvalidRequest"),
        (b"3\r\nabc\r\n0\r\n\r\n!", 3, "InvalidRequest"),
        (b"3\r\nabc\r\n0\r\nx-amz-checksum-crc32c:a\r\n\r\n", 3, "MalformedTrailerError"),
        (b"3\r\nabc\r\n0\r\nno colon\r\n\r\n", 3, "MalformedTrailerError"),
        (b"3\r\nabc\r\n0\r\na:" + b"x" * 5000, 3, "MalformedTrailerError"),
    ],
)
def test_unsigned_streams_that_are_refused(data: bytes, decoded: int, code: str) -> None:
    assert refused(data, decoded) == code


@pytest.mark.parametrize(
    ("trailer", "code"),
    [
        (b"", "MalformedTrailerError"),
        (b"x-amz-checksum-crc32c:a\r\nx-amz-checksum-crc32c:a\r\n", "MalformedTrailerError"),
        (b"x-amz-checksum-crc32c:\r\n", "MalformedTrailerError"),
        (b"x-amz-checksum-crc32c:a\r\n folded\r\n", "MalformedTrailerError"),
        (b"x-amz-checksum-crc32c:a\r\nother:b\r\n", "MalformedTrailerError"),
        (b"x-amz-checksum-crc32c:a\x01b\r\n", "MalformedTrailerError"),
    ],
)
def test_trailers_that_are_refused(trailer: bytes, code: str) -> None:
    assert refused(b"0\r\n" + trailer + b"\r\n", 0, UNSIGNED, frozenset({CRC})) == code


def test_trailers_in_capitals_and_with_spaces() -> None:
    decoder = ChunkedDecoder(verified(UNSIGNED), 0, frozenset({CRC}))
    assert decode(decoder, [b"0\r\nX-Amz-Checksum-CRC32C: \t sOO8/Q== \r\n\r\n"]) == (b"", {CRC: "sOO8/Q=="})


def test_signed_streams_that_are_refused() -> None:
    chunks = [b"x" * MIN_AWS_CHUNK_BYTES, b"y" * 10]
    data = encode(SIGNED, chunks, {})
    size = sum(map(len, chunks))
    assert refused(data.replace(b"y", b"z"), size, SIGNED) == "SignatureDoesNotMatch"
    assert refused(encode(SIGNED, chunks, {}, "1" * 64), size, SIGNED) == "SignatureDoesNotMatch"
    assert refused(b"3\r\nabc\r\n0\r\n\r\n", 3, SIGNED) == "InvalidRequest"
    line = data[: data.index(b"\r\n") + 2]
    assert refused(line[:-2] + b";more=1\r\n" + data[len(line) :], size, SIGNED) == "InvalidRequest"
    swapped = encode(SIGNED, [chunks[0], b"z" * 10], {})
    first = len(line) + len(chunks[0]) + 2
    assert refused(data[:first] + swapped[first:-90] + data[-90:], size, SIGNED) == "SignatureDoesNotMatch"


def test_signed_trailers_that_are_refused() -> None:
    names = frozenset({CRC})
    data = encode(SIGNED_TRAILER, [b"abc"], {CRC: "sOO8/Q=="})
    assert refused(data.replace(b"sOO8", b"sOO9"), 3, SIGNED_TRAILER, names) == "SignatureDoesNotMatch"
    at = data.index(b"x-amz-trailer-signature")
    assert refused(data[:at] + b"\r\n", 3, SIGNED_TRAILER, names) == "MalformedTrailerError"
    moved = data[: data.index(CRC.encode())] + data[at:-2] + f"{CRC}:sOO8/Q==\r\n\r\n".encode()
    assert refused(moved, 3, SIGNED_TRAILER, names) == "MalformedTrailerError"
    assert code_of(lambda: ChunkedDecoder(verified(SIGNED), 3, names)) == "InvalidRequest"


# --- checksums ---------------------------------------------------------------------------------------------------
VECTORS = {
    Algorithm.CRC32: "cbf43926",
    Algorithm.CRC32C: "e3069283",
    Algorithm.CRC64NVME: "ae8b14860a799888",
    Algorithm.SHA1: "f7c3bc1d808e04732adf679965ccc34ca7ae3441",
    Algorithm.SHA256: "15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225",
}
"""Digests of `123456789`: the check values of the CRC catalogue, and of sha1sum and sha256sum."""
ALGORITHMS = st.sampled_from(Algorithm)
CRCS = st.sampled_from([algorithm for algorithm in Algorithm if algorithm.is_crc])


def digest(algorithm: Algorithm, *pieces: bytes) -> bytes:
    over = checksums.digester(algorithm)
    for piece in pieces:
        over.update(memoryview(piece))
    return over.digest()


@pytest.mark.parametrize("algorithm", Algorithm)
def test_known_vectors(algorithm: Algorithm) -> None:
    assert digest(algorithm, b"1234", b"", b"56789").hex() == VECTORS[algorithm]
    assert len(digest(algorithm)) == algorithm.digest_bytes


@given(ALGORITHMS, st.lists(st.binary(max_size=100), max_size=6))
def test_a_digest_does_not_depend_on_the_pieces(algorithm: Algorithm, pieces: list[bytes]) -> None:
    assert digest(algorithm, *pieces) == digest(algorithm, b"".join(pieces))


@given(CRCS, st.lists(st.binary(max_size=300), max_size=6))
def test_combined_parts_have_the_checksum_of_the_whole(algorithm: Algorithm, parts: list[bytes]) -> None:
    combined = checksums.combine(algorithm, ((digest(algorithm, part), len(part)) for part in parts))
    assert combined == digest(algorithm, b"".join(parts))


def test_composite_checksums() -> None:
    parts = [digest(Algorithm.CRC32, b"a"), digest(Algorithm.CRC32, b"b")]
    found = checksums.composite(Algorithm.CRC32, parts)
    assert found.digest == zlib.crc32(b"".join(parts)).to_bytes(4, "big")
    assert found.text == b64encode(found.digest).decode() + "-2"
    assert checksums.headers(found) == {
        "x-amz-checksum-crc32": found.text,
        "x-amz-checksum-type": "COMPOSITE",
    }
    assert checksums.parse_object(Algorithm.CRC32, found.text) == found


@given(ALGORITHMS, st.data(), st.booleans(), st.integers(1, 10_000))
def test_checksums_come_back_from_their_text(
    algorithm: Algorithm, data: st.DataObject, composite: bool, parts: int
) -> None:
    size = algorithm.digest_bytes
    value = data.draw(st.binary(min_size=size, max_size=size))
    checksum = Checksum(algorithm, value)
    if composite:
        checksum = Checksum(algorithm, value, ChecksumType.COMPOSITE, parts)
    assert checksums.parse_object(algorithm, checksum.text) == checksum


@pytest.mark.parametrize(
    "text", ["", "AAAA", "AAAAAAA=", "AAAAAA==-0", "AAAAAA==-10001", "AAAAAA==-x", "é", "AAAA AA=="]
)
def test_texts_that_are_no_checksum(text: str) -> None:
    assert code_of(lambda: checksums.parse_object(Algorithm.CRC32, text)) == "InvalidRequest"


TRAILER_MODE = {"x-amz-content-sha256": UNSIGNED.value}


def wanted(**headers: str) -> checksums.Wanted:
    return checksums.wanted(
        request("/b/k", "PUT", headers={name.replace("_", "-"): value for name, value in headers.items()})
    )


def test_what_requests_state() -> None:
    nothing = checksums.Wanted(None, None, False, None)
    assert wanted() == nothing
    assert wanted(x_amz_checksum_mode="ENABLED", x_amz_checksum_type="COMPOSITE") == nothing
    assert wanted(x_amz_checksum_crc32="AAAAAA==", x_amz_sdk_checksum_algorithm="CRC32") == checksums.Wanted(
        Algorithm.CRC32, bytes(4), False, None
    )
    assert wanted(content_md5=b64encode(bytes(16)).decode()).md5 == bytes(16)
    found = wanted(
        x_amz_trailer="X-Amz-Checksum-CRC64NVME",
        x_amz_sdk_checksum_algorithm="CRC64NVME",
        x_amz_content_sha256=UNSIGNED.value,
    )
    assert found == checksums.Wanted(Algorithm.CRC64NVME, None, True, None)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"x_amz_checksum_crc32": "AAAAAA==", "x_amz_checksum_crc32c": "AAAAAA=="}, "InvalidRequest"),
        ({"x_amz_checksum_crc32": "AAAA"}, "InvalidRequest"),
        ({"x_amz_checksum_crc32": "AAAAAA==", "x_amz_sdk_checksum_algorithm": "SHA1"}, "InvalidRequest"),
        ({"x_amz_sdk_checksum_algorithm": "CRC32"}, "InvalidRequest"),
        ({"x_amz_sdk_checksum_algorithm": "CRC128"}, "InvalidRequest"),
        ({"x_amz_checksum_sha512": "AAAA"}, "NotImplemented"),
        ({"x_amz_trailer": "x-amz-checksum-crc32"}, "InvalidRequest"),
        ({"x_amz_trailer": "x-other", "x_amz_content_sha256": UNSIGNED.value}, "InvalidRequest"),
        (
            {
                "x_amz_trailer": "x-amz-checksum-crc32",
                "x_amz_checksum_crc32": "AAAAAA==",
                "x_amz_content_sha256": UNSIGNED.value,
            },
            "InvalidRequest",
        ),
        ({"content_md5": "AAAA"}, "InvalidDigest"),
        ({"content_md5": "!"}, "InvalidDigest"),
    ],
)
def test_stated_checksums_that_are_refused(headers: dict[str, str], code: str) -> None:
    assert code_of(lambda: wanted(**headers)) == code


@pytest.mark.parametrize("algorithm", Algorithm)
def test_types_of_multipart_checksums(algorithm: Algorithm) -> None:
    possible = [
        type_
        for type_ in ChecksumType
        if not (type_ is ChecksumType.FULL_OBJECT and algorithm in (Algorithm.SHA1, Algorithm.SHA256))
        and not (type_ is ChecksumType.COMPOSITE and algorithm is Algorithm.CRC64NVME)
    ]
    for type_ in ChecksumType:
        made = request(
            "/b/k?uploads",
            "POST",
            headers={
                "x-amz-checksum-algorithm": algorithm.value.lower(),
                "x-amz-checksum-type": type_.value.title(),
            },
        )
        if type_ in possible:
            assert checksums.asked(made) == (algorithm, type_)
        else:
            assert code_of(lambda made=made: checksums.asked(made)) == "InvalidRequest"
    assert checksums.default_type(algorithm) in possible
    assert checksums.asked(request("/b/k?uploads", "POST")) == (None, None)


def test_a_mismatch_is_a_bad_digest() -> None:
    checksums.verify("CRC32", b"abcd", b"abcd")
    assert code_of(lambda: checksums.verify("CRC32", b"abcd", b"abce")) == "BadDigest"

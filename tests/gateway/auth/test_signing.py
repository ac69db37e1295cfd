"""Signature Version 4: botocore's signers and the examples of AWS are accepted, and nothing that differs from them."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.auth.sigv4 import PayloadMode, Verified, verify
from gateway.protocol.errors import S3Error
from gateway.protocol.request import Request
from tests.support.s3 import (
    CREDENTIAL,
    CREDENTIALS,
    HOST,
    REGION,
    presigned,
    request,
    signed,
    signing_time,
)

EXAMPLE_HOST = "examplebucket.s3.amazonaws.com"
EXAMPLE_TIME = 1369353600.0
"""20130524T000000Z"""
EMPTY = sha256(b"").hexdigest()

KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)
NAMES = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12)
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30)
PARAMETERS = st.text(min_size=1, max_size=10).filter(
    lambda name: not name.lower().startswith("x-amz-") and name != "AWSAccessKeyId"
)
QUERIES = st.dictionaries(PARAMETERS, st.text(max_size=20), max_size=5)
HEADERS = st.dictionaries(NAMES.map("x-amz-meta-".__add__), VALUES, max_size=5)
METHODS = st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD"])


def url(key: str, query: dict[str, str], host: str = HOST) -> str:
    pairs = "&".join(f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in query.items())
    return f"http://{host}/bucket/{quote(key, safe='/~')}" + ("?" + pairs if pairs else "")


def check(made: Request, now: float | None = None) -> Verified:
    return verify(made, CREDENTIALS, signing_time(made) if now is None else now, REGION)


def refusal(made: Request, now: float | None = None, region: str = REGION) -> S3Error:
    with pytest.raises(S3Error) as caught:
        verify(made, CREDENTIALS, signing_time(made) if now is None else now, region)
    return caught.value


# --- against botocore ------------------------------------------------------------------------------------------
@settings(max_examples=300, deadline=None)
@given(KEYS, QUERIES, HEADERS, METHODS, st.binary(max_size=100))
def test_what_botocore_signs_in_headers_is_accepted(
    key: str, query: dict[str, str], headers: dict[str, str], method: str, body: bytes
) -> None:
    made = signed(url(key, query), method, headers=headers, body=body)
    verified = check(made)
    assert verified.credential is CREDENTIAL
    assert verified.mode is PayloadMode.SHA256
    assert verified.payload_sha256 == sha256(body).digest()
    assert not verified.presigned


@settings(max_examples=200, deadline=None)
@given(KEYS, QUERIES, METHODS, st.integers(1, 604800))
def test_what_botocore_presigns_is_accepted_until_it_expires(
    key: str, query: dict[str, str], method: str, expires_s: int
) -> None:
    made = presigned(url(key, query), method, expires_s=expires_s)
    begin = signing_time(made)
    for now in (begin, begin + expires_s - 1):
        verified = check(made, now)
        assert verified.presigned
        assert verified.mode is PayloadMode.UNSIGNED
    assert refusal(made, begin + expires_s).code == "AccessDenied"


@settings(max_examples=300, deadline=None)
@given(st.data(), KEYS, QUERIES, HEADERS)
def test_no_changed_request_is_accepted(
    data: st.DataObject, key: str, query: dict[str, str], headers: dict[str, str]
) -> None:
    target = url(key, query)
    made = signed(target, headers=headers) if data.draw(st.booleans()) else presigned(target, headers=headers)
    changes = {
        "method": lambda: replace(made, method="PUT"),
        "path": lambda: replace(made, raw_path=made.raw_path + b"x"),
        "slashes": lambda: replace(made, raw_path=made.raw_path.replace(b"/bucket/", b"/bucket//")),
        "query": lambda: replace(made, raw_query=made.raw_query + b"&versionId=null"),
        "host": lambda: replace(made, headers=[(b"host", b"elsewhere"), *made.headers[1:]]),
        "header": lambda: replace(made, headers=[*made.headers, (b"x-amz-acl", b"private")]),
        "repeat": lambda: replace(made, headers=[*made.headers, (b"host", HOST.encode())]),
    }
    change = data.draw(st.sampled_from(sorted(changes)))
    assert refusal(changes[change](), signing_time(made)).code in (
        "SignatureDoesNotMatch",
        "AccessDenied",
        "InvalidURI",
    ), change


@pytest.mark.parametrize("character", list("0123456789abcdef"))
def test_no_other_signature_is_accepted(character: str) -> None:
    made = signed(url("key", {}))
    authorization = made.header(b"authorization") or ""
    before, name, signature = authorization.rpartition("Signature=")
    if signature[0] == character:
        assert check(made)
        return
    changed = [pair for pair in made.headers if pair[0] != b"authorization"]
    changed.append((b"authorization", (before + name + character + signature[1:]).encode()))
    error = refusal(replace(made, headers=changed))
    assert error.code == "SignatureDoesNotMatch"
    assert error.detail["SignatureProvided"] == character + signature[1:]


# --- the examples of the S3 API Reference -------------------------------------------------------------------------
def example(signature: str, names: str, method: str, target: str, **headers: str) -> Request:
    fixed = {"x-amz-date": "20130524T000000Z"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    fixed["authorization"] = (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        f"SignedHeaders={names},Signature={signature}"
    )
    return request(target, method, host=EXAMPLE_HOST, headers=fixed)


EXAMPLES = {
    "get an object": example(
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        "host;range;x-amz-content-sha256;x-amz-date",
        "GET",
        "/test.txt",
        range="bytes=0-9",
        x_amz_content_sha256=EMPTY,
    ),
    "put an object": example(
        "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
        "PUT",
        "/test%24file.text",
        date="Fri, 24 May 2013 00:00:00 GMT",
        x_amz_storage_class="REDUCED_REDUNDANCY",
        x_amz_content_sha256=sha256(b"Welcome to Amazon S3.").hexdigest(),
    ),
    "get the lifecycle": example(
        "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        "host;x-amz-content-sha256;x-amz-date",
        "GET",
        "/?lifecycle",
        x_amz_content_sha256=EMPTY,
    ),
    "list objects": example(
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        "host;x-amz-content-sha256;x-amz-date",
        "GET",
        "/?max-keys=2&prefix=J",
        x_amz_content_sha256=EMPTY,
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_headers(name: str) -> None:
    assert check(EXAMPLES[name], EXAMPLE_TIME).credential is CREDENTIAL


def test_example_in_the_query() -> None:
    made = request(
        "/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2F"
        "us-east-1%2Fs3%2Faws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
        "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404",
        host=EXAMPLE_HOST,
    )
    assert check(made, EXAMPLE_TIME).presigned


# --- forms that clients send --------------------------------------------------------------------------------------
def reordered(made: Request, separator: str, order: tuple[int, ...]) -> Request:
    algorithm, _, rest = (made.header(b"authorization") or "").partition(" ")
    parts = [part.strip() for part in rest.split(",")]
    text = f"{algorithm} {separator.join(parts[index] for index in order)}"
    headers = [pair for pair in made.headers if pair[0] != b"authorization"]
    return replace(made, headers=[*headers, (b"authorization", text.encode())])


@pytest.mark.parametrize("separator", [",", ", ", " , "])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_authorization_with_any_order_and_spacing(separator: str, order: tuple[int, ...]) -> None:
    assert check(reordered(signed(url("k", {"a": "b"})), separator, order))


def test_repeated_headers_and_runs_of_spaces_are_signed_as_one_value() -> None:
    made = signed(url("k", {}), headers={"x-amz-meta-a": "one,two   three"})
    headers: list[tuple[bytes, bytes]] = []
    for name, value in made.headers:
        if name == b"x-amz-meta-a":
            headers += [(name, b"one"), (name, b"two   three")]
        else:
            headers.append((name, value))
    assert check(replace(made, headers=headers))


def test_a_path_that_was_signed_escaped_and_sent_plain() -> None:
    made = signed(url("a(b)!'*=@&$:;,k", {}))
    assert check(replace(made, raw_path=b"/bucket/a(b)!'*=@&$:;,k"))


def test_a_query_that_was_signed_escaped_and_sent_plain() -> None:
    made = signed(url("", {"prefix": "a/b c", "delimiter": "/"}))
    assert check(replace(made, raw_query=b"prefix=a/b+c&delimiter=/"))


def test_a_latin_1_header_that_was_signed_as_utf_8() -> None:
    made = signed(url("k", {}), headers={"x-amz-meta-a": "caf\xe9"})
    assert (b"x-amz-meta-a", b"caf\xe9") in made.headers
    assert check(made)


@pytest.mark.parametrize("path", ["a/../b", "a//b", "./a", "/a", "a%2Fb", "a%252Fb", "a+b", "%7Ea"])
def test_the_raw_path_is_signed_without_normalising(path: str) -> None:
    assert check(signed(f"http://{HOST}/bucket/{path}"))


def test_hoisted_headers_count_as_headers_of_a_presigned_request() -> None:
    made = presigned(url("k", {"x-amz-meta-colour": "blue"}), "PUT")
    assert check(made)
    assert made.header(b"x-amz-meta-colour") == "blue"
    both = presigned(url("k", {"x-amz-acl": "private"}), "PUT", headers={"x-amz-acl": "public-read"})
    assert check(both)
    assert both.header(b"x-amz-acl") == "public-read"
    plain = signed(url("k", {"x-amz-meta-colour": "blue"}), "PUT")
    assert plain.header(b"x-amz-meta-colour") is None


@pytest.mark.parametrize("mode", [mode for mode in PayloadMode if mode is not PayloadMode.SHA256])
def test_payload_modes(mode: PayloadMode) -> None:
    made = signed(url("k", {}), "PUT", payload=mode.value)
    verified = check(made)
    assert verified.mode is mode
    assert verified.payload_sha256 is None
    assert mode.is_streaming == mode.value.startswith("STREAMING")


# --- refusals -----------------------------------------------------------------------------------------------------
def without(made: Request, name: bytes) -> Request:
    return replace(made, headers=[pair for pair in made.headers if pair[0] != name])


def with_query(made: Request, name: str, value: str | None) -> Request:
    pairs = [pair for pair in made.raw_query.split(b"&") if not pair.startswith(name.encode() + b"=")]
    if value is not None:
        pairs.append(f"{name}={quote(value, safe='')}".encode())
    return replace(made, raw_query=b"&".join(pairs))


def test_anonymous_requests_are_refused() -> None:
    assert refusal(request("/bucket/key"), 0).code == "AccessDenied"
    assert refusal(request("/bucket/key?x-amz-signature=1"), 0).code == "AccessDenied"


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/b/k?AWSAccessKeyId=A&Signature=b&Expires=1", {}),
        ("/b/k", {"authorization": "AWS AKIA:signature"}),
        ("/b/k", {"authorization": "AWS4-ECDSA-P256-SHA256 Credential=a"}),
    ],
)
def test_other_signature_versions_are_refused_by_name(target: str, headers: dict[str, str]) -> None:
    error = refusal(request(target, headers=headers), 0)
    assert (error.code, error.status) == ("InvalidRequest", 400)
    assert "AWS4-HMAC-SHA256" in error.message


@pytest.mark.parametrize(
    ("skew_s", "code"),
    [(900, None), (-900, None), (901, "RequestTimeTooSkewed"), (-901, "RequestTimeTooSkewed")],
)
def test_clock_skew(skew_s: float, code: str | None) -> None:
    made = signed(url("k", {}))
    now = signing_time(made) + skew_s
    if code is None:
        assert check(made, now)
    else:
        assert refusal(made, now).code == code


def test_a_presigned_request_from_the_future_is_not_valid_yet() -> None:
    made = presigned(url("k", {}))
    assert check(made, signing_time(made) - 900)
    assert refusal(made, signing_time(made) - 901).code == "AccessDenied"


@pytest.mark.parametrize("value", ["0", "604801", "-1", "x", "", "١", "1" * 5000])
def test_expiry_outside_its_limits(value: str) -> None:
    made = with_query(presigned(url("k", {})), "X-Amz-Expires", value)
    assert refusal(made).code == "AuthorizationQueryParametersError"


@pytest.mark.parametrize("name", ["X-Amz-Credential", "X-Amz-Date", "X-Amz-SignedHeaders", "X-Amz-Expires"])
def test_a_missing_query_parameter(name: str) -> None:
    made = presigned(url("k", {}))
    assert (
        refusal(with_query(made, name, None), signing_time(made)).code == "AuthorizationQueryParametersError"
    )


SCOPE = "AKIAIOSFODNN7EXAMPLE/{date}/us-east-1/s3/aws4_request"


@pytest.mark.parametrize(
    "credential",
    [
        "",
        "AKIA",
        SCOPE.replace("s3", "ec2"),
        SCOPE.replace("aws4_request", "aws3_request"),
        SCOPE.replace("{date}", "20000101"),
        SCOPE.replace("{date}", ""),
        SCOPE.replace("us-east-1", "us-west-2"),
    ],
)
def test_a_wrong_scope(credential: str) -> None:
    made = signed(url("k", {}))
    date = (made.header(b"x-amz-date") or "")[:8]
    text = (made.header(b"authorization") or "").replace(
        SCOPE.format(date=date), credential.format(date=date)
    )
    changed = [*without(made, b"authorization").headers, (b"authorization", text.encode())]
    assert refusal(replace(made, headers=changed)).code == "AuthorizationHeaderMalformed"


def test_the_right_region_is_named() -> None:
    error = refusal(signed(url("k", {})), region="eu-1")
    assert error.code == "AuthorizationHeaderMalformed"
    assert error.detail["Region"] == "eu-1"


def test_an_unknown_access_key() -> None:
    made = signed(url("k", {}))
    text = (made.header(b"authorization") or "").replace(CREDENTIAL.access_key, "NOBODY")
    changed = [*without(made, b"authorization").headers, (b"authorization", text.encode())]
    assert refusal(replace(made, headers=changed)).code == "InvalidAccessKeyId"


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("x-amz-security-token", "t", "InvalidToken"),
        ("x-amz-acl", "private", "AccessDenied"),
        ("x-amz-content-sha256", "abc", "InvalidArgument"),
        ("x-amz-content-sha256", EMPTY.upper(), "InvalidArgument"),
        ("x-amz-date", "yesterday", "AccessDenied"),
        ("x-amz-date", "20261332T000000Z", "AccessDenied"),
    ],
)
def test_headers_that_do_not_go(name: str, value: str, code: str) -> None:
    made = signed(url("k", {}))
    headers = [*without(made, name.encode()).headers, (name.encode(), value.encode())]
    assert refusal(replace(made, headers=headers), signing_time(made)).code == code


@pytest.mark.parametrize("names", ["host;" + "x" * 4096, ";".join(["host"] * 65)])
def test_limits_of_signed_headers(names: str) -> None:
    made = signed(url("k", {}))
    before, _, after = (made.header(b"authorization") or "").partition("SignedHeaders=")
    text = f"{before}SignedHeaders={names},{after.partition(',')[2]}"
    changed = [*without(made, b"authorization").headers, (b"authorization", text.encode())]
    assert refusal(replace(made, headers=changed)).code == "AuthorizationHeaderMalformed"
    query = with_query(presigned(url("k", {})), "X-Amz-SignedHeaders", names)
    assert refusal(query).code == "AuthorizationQueryParametersError"


def test_needed_headers() -> None:
    made = signed(url("k", {}))
    now = signing_time(made)
    assert refusal(without(made, b"x-amz-content-sha256")).code == "InvalidRequest"
    assert refusal(without(made, b"x-amz-date"), now).code == "AccessDenied"
    assert refusal(without(made, b"host")).code == "SignatureDoesNotMatch"
    text = (made.header(b"authorization") or "").replace("host;", "")
    changed = [*without(made, b"authorization").headers, (b"authorization", text.encode())]
    error = refusal(replace(made, headers=changed))
    assert (error.code, error.detail["HeadersNotSigned"]) == ("AccessDenied", "host")


def test_two_signatures_are_refused() -> None:
    made = presigned(url("k", {}))
    both = replace(made, headers=[*made.headers, (b"authorization", b"AWS4-HMAC-SHA256 x")])
    assert refusal(both).code == "InvalidArgument"


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(max_codepoint=0xFF), max_size=120), st.booleans())
def test_any_authorization_is_answered_with_an_s3_error(text: str, known: bool) -> None:
    value = ("AWS4-HMAC-SHA256 " if known else "") + text
    made = request("/b/k", headers={"authorization": value, "x-amz-date": "20130524T000000Z"})
    assert refusal(made, EXAMPLE_TIME).status in (400, 403)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires",
    "X-Amz-SignedHeaders", "X-Amz-Signature"]), st.text(max_size=30)))  # fmt: skip
def test_any_query_is_answered_with_an_s3_error(query: dict[str, str]) -> None:
    pairs = "&".join(f"{name}={quote(value, safe='', errors='replace')}" for name, value in query.items())
    assert refusal(request("/b/k?" + pairs), EXAMPLE_TIME).status in (400, 403)


def test_no_secret_is_shown() -> None:
    made = signed(url("k", {}))
    verified = check(made)
    shown = [repr(verified), str(verified), repr(CREDENTIAL), str(CREDENTIAL), f"{CREDENTIALS!r}"]
    broken = replace(made, method="PUT")
    error = refusal(broken)
    shown += [repr(error), str(error), str(error.detail)]
    for text in shown:
        assert CREDENTIAL.secret not in text
        assert verified.signing_key.hex() not in text
        assert repr(verified.signing_key) not in text

"""Addresses, routes, conditions, ranges and errors of the S3 door: tables, and properties on any input."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.operations.bucket_configurations import EMPTY, MISSING
from gateway.protocol import conditions, etag, ranges, routing
from gateway.protocol.action import Action, CopySource, Operation
from gateway.protocol.addressing import Address, resolve
from gateway.protocol.conditions import Conditions
from gateway.protocol.errors import CODES, S3Error, from_kvfs
from gateway.protocol.ranges import Span
from gateway.protocol.routing import BUCKET_CONFIGURATIONS, route
from kvfs import errors
from tests.support.s3 import request

KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)


def action(target: str, method: str = "GET", headers: dict[str, str | bytes] | None = None) -> Action:
    made = request(target, method, headers=headers)
    return route(made, resolve(made))


def refusal(target: str, method: str = "GET", headers: dict[str, str | bytes] | None = None) -> S3Error:
    with pytest.raises(S3Error) as caught:
        action(target, method, headers)
    return caught.value


OK, FAILED, SAME = 200, 412, 304


def status_of(check: object, *arguments: object) -> int:
    assert callable(check)
    try:
        check(*arguments)
    except S3Error as error:
        return error.status
    return OK


# --- errors ------------------------------------------------------------------------------------------------------
KVFS_ERRORS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.KvfsError)
]


def test_each_configuration_that_is_read_has_one_answer() -> None:
    answered = [*MISSING, *EMPTY]
    assert sorted(answered) == sorted(BUCKET_CONFIGURATIONS)


@pytest.mark.parametrize("kind", KVFS_ERRORS, ids=lambda kind: kind.__name__)
def test_every_failure_of_the_store_has_a_code_with_a_status(kind: type[errors.KvfsError]) -> None:
    error = from_kvfs(kind("/secret/path: uid 7"), "bucket/a/key")
    assert error.code == kind.s3_code in CODES
    assert 300 <= error.status < 600
    if error.status >= 500 or error.status in (403, 404):
        assert "secret" not in error.message or error.code == "NotImplemented"


def test_a_full_store_is_refused_with_a_status_that_botocore_does_not_retry() -> None:
    from botocore.retries.standard import ThrottledRetryableChecker, TransientRetryableChecker

    error = from_kvfs(errors.NoSpace("full"), "b/k")
    assert (error.code, error.status) == ("InsufficientStorage", 507)
    assert error.status not in TransientRetryableChecker._TRANSIENT_STATUS_CODES
    assert error.code not in TransientRetryableChecker._TRANSIENT_ERROR_CODES
    assert error.code not in ThrottledRetryableChecker._THROTTLED_ERROR_CODES


def test_the_page_about_s3_lists_every_code_under_its_status() -> None:
    page = (Path(__file__).parents[3] / "docs" / "s3.md").read_text()
    listed = {
        code: int(status)
        for status, codes in re.findall(r"^\| (\d{3}) \| ([A-Za-z0-9, ]+) \|$", page, re.MULTILINE)
        for code in codes.split(", ")
    }
    assert listed == {code: S3Error(code).status for code in CODES}
    for operation in Operation:
        assert operation.value in page


def test_an_unknown_code_cannot_be_raised() -> None:
    with pytest.raises(KeyError):
        S3Error("Oops")


# --- addresses ---------------------------------------------------------------------------------------------------
DOMAINS = ("s3.example.org", "example.org")


@pytest.mark.parametrize(
    ("host", "path", "default", "address"),
    [
        ("s3.example.org", "/", None, Address(None, None)),
        ("s3.example.org", "/bkt", None, Address("bkt", None)),
        ("s3.example.org", "/bkt/", None, Address("bkt", None)),
        ("s3.example.org:9000", "/bkt/k", None, Address("bkt", "k")),
        ("S3.Example.ORG", "/bkt//k", None, Address("bkt", "/k")),
        ("bkt.s3.example.org", "/", None, Address("bkt", None)),
        ("bkt.s3.example.org:9000", "/k/", None, Address("bkt", "k/")),
        ("a.b.s3.example.org.", "/k", None, Address("a.b", "k")),
        ("bkt.example.org", "//k", None, Address("bkt", "/k")),
        ("notexample.org", "/bkt/k", None, Address("bkt", "k")),
        ("notexample.org", "/bkt/k", "dflt", Address("dflt", "bkt/k")),
        ("cache.test:80", "/", "dflt", Address("dflt", None)),
        ("127.0.0.1:9000", "/bkt/k", "dflt", Address("bkt", "k")),
        ("[::1]:9000", "/bkt/k", "dflt", Address("bkt", "k")),
        ("localhost:9000", "/bkt/k", "dflt", Address("bkt", "k")),
        ("", "/bkt/k", "dflt", Address("bkt", "k")),
        ("x", "/bkt/a%2Fb%252F+%20./../", None, Address("bkt", "a/b%2F+ ./../")),
        ("x", "/b%75cket/k", None, Address("bucket", "k")),
    ],
)
def test_addresses(host: str, path: str, default: str | None, address: Address) -> None:
    assert resolve(request(path, host=host), DOMAINS, default) == address


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("bkt", "InvalidURI"),
        ("*", "InvalidURI"),
        ("//k", "InvalidBucketName"),
        ("/b%2Fk", "InvalidBucketName"),
        ("/b%00", "InvalidBucketName"),
        ("/..", "InvalidBucketName"),
        ("/" + "b" * 64, "InvalidBucketName"),
        ("/bkt/%ff", "InvalidURI"),
        ("/bkt/%ed%a0%80", "InvalidURI"),
        ("/bkt/a%00b", "InvalidArgument"),
        ("/bkt/" + "k" * 1025, "KeyTooLongError"),
        ("/bkt/" + "%C3%A9" * 513, "KeyTooLongError"),
    ],
)
def test_addresses_that_are_none(path: str, code: str) -> None:
    with pytest.raises(S3Error) as caught:
        resolve(request(path))
    assert caught.value.code == code


def test_the_longest_key() -> None:
    assert resolve(request("/bkt/" + "%C3%A9" * 512)).key == "é" * 512


@given(KEYS)
def test_keys_come_back_as_they_are(key: str) -> None:
    assert resolve(request("/bkt/" + quote(key, safe="/"))).key == key
    assert resolve(request("/" + quote(key, safe=""), host="bkt.example.org"), DOMAINS).key == key


# --- routes ------------------------------------------------------------------------------------------------------
ROUTES = [
    ("GET", "/", Operation.LIST_BUCKETS),
    ("GET", "/?x-id=ListBuckets&max-buckets=3", Operation.LIST_BUCKETS),
    ("PUT", "/b", Operation.CREATE_BUCKET),
    ("HEAD", "/b", Operation.HEAD_BUCKET),
    ("DELETE", "/b/", Operation.DELETE_BUCKET),
    ("GET", "/b?location", Operation.GET_BUCKET_LOCATION),
    ("GET", "/b/?location=", Operation.GET_BUCKET_LOCATION),
    ("GET", "/b", Operation.LIST_OBJECTS),
    ("GET", "/b?prefix=list-type&unknown=1", Operation.LIST_OBJECTS),
    ("GET", "/b?list-type=2&prefix=a", Operation.LIST_OBJECTS_V2),
    ("GET", "/b?versions&prefix=a", Operation.LIST_OBJECT_VERSIONS),
    ("GET", "/b?uploads", Operation.LIST_MULTIPART_UPLOADS),
    ("POST", "/b?delete", Operation.DELETE_OBJECTS),
    ("POST", "/b?delete=", Operation.DELETE_OBJECTS),
    ("POST", "/b?match", Operation.MATCH),
    ("GET", "/b/k", Operation.GET_OBJECT),
    ("GET", "/b/k?x-id=GetObject&response-content-type=a", Operation.GET_OBJECT),
    ("GET", "/b/k?versionId=null&partNumber=3", Operation.GET_OBJECT),
    ("HEAD", "/b/k?partNumber=1", Operation.HEAD_OBJECT),
    ("PUT", "/b/k", Operation.PUT_OBJECT),
    ("PUT", "/b/k?X-Amz-Signature=a&x-id=PutObject", Operation.PUT_OBJECT),
    ("DELETE", "/b/k?versionId=null", Operation.DELETE_OBJECT),
    ("GET", "/b/k?attributes", Operation.GET_OBJECT_ATTRIBUTES),
    ("GET", "/b/k?tagging", Operation.GET_OBJECT_TAGGING),
    ("PUT", "/b/k?tagging", Operation.PUT_OBJECT_TAGGING),
    ("DELETE", "/b/k?tagging", Operation.DELETE_OBJECT_TAGGING),
    ("POST", "/b/k?uploads", Operation.CREATE_MULTIPART_UPLOAD),
    ("PUT", "/b/k?partNumber=10000&uploadId=u", Operation.UPLOAD_PART),
    ("POST", "/b/k?uploadId=u", Operation.COMPLETE_MULTIPART_UPLOAD),
    ("DELETE", "/b/k?uploadId=u", Operation.ABORT_MULTIPART_UPLOAD),
    ("GET", "/b/k?uploadId=u&max-parts=3", Operation.LIST_PARTS),
    ("GET", "/b?acl", Operation.GET_BUCKET_ACL),
    ("GET", "/b?tagging", Operation.GET_BUCKET_TAGGING),
    ("PUT", "/b?tagging", Operation.PUT_BUCKET_TAGGING),
    ("DELETE", "/b?tagging", Operation.DELETE_BUCKET_TAGGING),
    ("GET", "/b/k?acl&versionId=null", Operation.GET_OBJECT_ACL),
    *[("GET", f"/b?{name}", Operation.GET_BUCKET_CONFIGURATION) for name in BUCKET_CONFIGURATIONS],
]


@pytest.mark.parametrize(("method", "target", "operation"), ROUTES, ids=lambda value: str(value))
def test_routes(method: str, target: str, operation: Operation) -> None:
    assert action(target, method).operation is operation


def test_every_operation_has_a_route_and_a_right() -> None:
    by_header = {Operation.COPY_OBJECT, Operation.UPLOAD_PART_COPY}
    by_header |= {Operation.PUT_BUCKET_ACL, Operation.PUT_OBJECT_ACL}
    assert {operation for _, _, operation in ROUTES} | by_header == set(Operation)
    for operation in Operation:
        method = next((method for method, _, found in ROUTES if found is operation), "PUT")
        if method in ("GET", "HEAD") and operation is not Operation.LIST_BUCKETS:
            assert operation.right in ("read", "list")
    assert Operation.PUT_OBJECT.right == Operation.DELETE_OBJECTS.right == "write"
    assert Operation.LIST_OBJECTS_V2.right == "list"
    assert Operation.GET_OBJECT.right == Operation.MATCH.right == "read"


def test_arguments_are_decoded_once() -> None:
    found = action("/b?prefix=a%2520b+c%2B&delimiter=%2F&marker")
    assert found.arguments == {"prefix": "a%20b c+", "delimiter": "/", "marker": ""}


def test_copies() -> None:
    source: dict[str, str | bytes] = {"x-amz-copy-source": "/src/a%2Fb%20c+d?versionId=null"}
    found = action("/b/k", "PUT", source)
    assert (found.operation, found.source) == (Operation.COPY_OBJECT, CopySource("src", "a/b c+d"))
    found = action("/b/k?partNumber=2&uploadId=u", "PUT", source)
    assert (found.operation, found.part_number, found.upload_id) == (Operation.UPLOAD_PART_COPY, 2, "u")
    assert action("/b/k", "PUT", {"x-amz-copy-source": "src%2Fk%3FversionId=1"}).source == CopySource(
        "src", "k?versionId=1"
    )
    assert action("/b/k", "GET", source).operation is Operation.GET_OBJECT


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("", "InvalidArgument"),
        ("bucket", "InvalidArgument"),
        ("/bucket/", "InvalidArgument"),
        ("//key", "InvalidArgument"),
        ("arn:aws:s3:::b/k", "InvalidArgument"),
        ("b/k?versionId=3", "NoSuchVersion"),
        ("b/k?versionId=", "InvalidArgument"),
        ("b/%ff", "InvalidArgument"),
        ("b/%zz", "InvalidArgument"),
        ("b/k%", "InvalidArgument"),
        ("b!/k", "InvalidArgument"),
        ("b/" + "k" * 1025, "InvalidArgument"),
    ],
)
def test_copy_sources_that_are_none(source: str, code: str) -> None:
    assert refusal("/b/k", "PUT", {"x-amz-copy-source": source}).code == code


@pytest.mark.parametrize(
    ("method", "target", "code"),
    [
        ("POST", "/", "MethodNotAllowed"),
        ("HEAD", "/", "MethodNotAllowed"),
        ("PATCH", "/b/k", "MethodNotAllowed"),
        ("OPTIONS", "/b", "MethodNotAllowed"),
        ("POST", "/b/k", "MethodNotAllowed"),
        ("POST", "/b", "NotImplemented"),
        ("DELETE", "/b?location", "MethodNotAllowed"),
        ("PUT", "/b/k?uploads", "MethodNotAllowed"),
        ("PUT", "/b?notification", "NotImplemented"),
        ("GET", "/b/k?policy", "NotImplemented"),
        ("GET", "/b/k?retention", "NotImplemented"),
        ("PUT", "/b?acl", "AccessControlListNotSupported"),
        ("PUT", "/b/k?acl", "AccessControlListNotSupported"),
        *[(method, f"/b?{name}", "NotImplemented") for name in BUCKET_CONFIGURATIONS for method in ("PUT",
        "DELETE")], ("GET", "/b/k?torrent", "NotImplemented"),
        ("PUT", "/b/k?retention", "NotImplemented"),
        ("PUT", "/b/k?newfeature", "NotImplemented"),
        ("DELETE", "/b?newfeature", "NotImplemented"),
        ("POST", "/b/k?select&select-type=2", "NotImplemented"),
        ("GET", "/b?uploads&versions", "InvalidRequest"),
        ("GET", "/b?list-type=1", "InvalidArgument"),
        ("GET", "/b?prefix=a&prefix=b", "InvalidArgument"),
        ("GET", "/b?prefix=%ff", "InvalidURI"),
        ("GET", "/b?" + "&".join(f"x{n}" for n in range(65)), "InvalidArgument"),
        ("GET", "/b/k?partNumber=0", "InvalidArgument"),
        ("GET", "/b/k?partNumber=10001", "InvalidArgument"),
        ("GET", "/b/k?partNumber=x", "InvalidArgument"),
        ("GET", "/b/k?partNumber=" + "0" * 9 + "99999", "InvalidArgument"),
        ("PUT", "/b/k?partNumber=1", "InvalidArgument"),
        ("PUT", "/b/k?uploadId=u", "InvalidArgument"),
        ("PUT", "/b/k?uploadId=&partNumber=1", "InvalidArgument"),
        ("PUT", "/b/k?versionId=null", "InvalidArgument"),
        ("GET", "/b/k?versionId=1", "NoSuchVersion"),
        ("GET", "/b/k?versionId=", "InvalidArgument"),
    ],
)  # fmt: skip
def test_what_is_not_served(method: str, target: str, code: str) -> None:
    assert refusal(target, method).code == code


def test_allowed_methods_are_named() -> None:
    assert refusal("/b/k", "PATCH").headers["Allow"] == "GET, HEAD, PUT, DELETE"


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("x-amz-server-side-encryption", "AES256", "NotImplemented"),
        ("x-amz-server-side-encryption-customer-algorithm", "AES256", "NotImplemented"),
        ("x-amz-acl", "public-read", "AccessControlListNotSupported"),
        ("x-amz-acl", "public-read-write", "AccessControlListNotSupported"),
        ("x-amz-acl", "bucket-owner-read", "AccessControlListNotSupported"),
        ("x-amz-acl", "bucket-owner-full-control", None),
        ("x-amz-acl", "public-ready", "InvalidArgument"),
        ("x-amz-acl", "private", None),
        ("x-amz-object-ownership", "BucketOwnerEnforced", None),
        ("x-amz-object-ownership", "BucketOwnerPreferred", "NotImplemented"),
        ("x-amz-object-ownership", "Everybody", "InvalidArgument"),
        ("x-amz-object-ownership", "ObjectWriter", None),
        ("x-amz-grant-read", "id=1", "AccessControlListNotSupported"),
        ("x-amz-storage-class", "GLACIER", "InvalidStorageClass"),
        ("x-amz-storage-class", "STANDARD", None),
        ("x-amz-object-lock-mode", "GOVERNANCE", "NotImplemented"),
        ("x-amz-bucket-object-lock-enabled", "true", "NotImplemented"),
        ("x-amz-bucket-object-lock-enabled", "False", None),
        ("x-amz-website-redirect-location", "/", "NotImplemented"),
        ("x-amz-write-offset-bytes", "0", "NotImplemented"),
    ],
)
def test_headers_that_ask_for_what_is_not_done(name: str, value: str, code: str | None) -> None:
    headers: dict[str, str | bytes] = {name: value}
    if code is None:
        assert action("/b/k", "PUT", headers).operation is Operation.PUT_OBJECT
    else:
        assert refusal("/b/k", "PUT", headers).code == code


@pytest.mark.parametrize("headers", [{"x-amz-acl": "public-read"}, {"x-amz-grant-write": "id=1"}])
def test_a_new_bucket_has_no_acl(headers: dict[str, str | bytes]) -> None:
    assert refusal("/b", "PUT", headers).code == "InvalidBucketAclWithObjectOwnership"
    assert action("/b", "PUT", {"x-amz-acl": "private"}).operation is Operation.CREATE_BUCKET


@pytest.mark.parametrize("target", ["/b/%zz", "/b/%", "/b/a%2", "/b%/k", "/b?prefix=%g0", "/b?%=1"])
def test_escapes_that_are_none(target: str) -> None:
    assert refusal(target).code == "InvalidURI"


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD", "PATCH"]),
    st.sampled_from(["/", "/b", "/b/k"]),
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=40),
)
def test_any_request_is_an_action_or_an_s3_error(method: str, path: str, query: str) -> None:
    status = status_of(action, f"{path}?{query}", method)
    assert status in (OK, 400, 404, 405, 501)


# --- conditions --------------------------------------------------------------------------------------------------
BEFORE, THEN, AFTER = (
    "Fri, 02 Jan 2026 03:04:04 GMT",
    "Fri, 02 Jan 2026 03:04:05 GMT",
    "Fri, 02 Jan 2026 03:04:06 GMT",
)
THEN_S = 1767323045

READS = [
    ({}, OK),
    ({"if-match": '"e"'}, OK),
    ({"if-match": "e"}, OK),
    ({"if-match": "*"}, OK),
    ({"if-match": '"x", "e"'}, OK),
    ({"if-match": '"x"'}, FAILED),
    ({"if-none-match": '"x"'}, OK),
    ({"if-none-match": '"e"'}, SAME),
    ({"if-none-match": 'W/"e"'}, SAME),
    ({"if-none-match": "*"}, SAME),
    ({"if-modified-since": BEFORE}, OK),
    ({"if-modified-since": THEN}, SAME),
    ({"if-modified-since": AFTER}, SAME),
    ({"if-modified-since": "soon"}, OK),
    ({"if-unmodified-since": BEFORE}, FAILED),
    ({"if-unmodified-since": THEN}, OK),
    ({"if-unmodified-since": "never"}, OK),
    ({"if-match": '"e"', "if-unmodified-since": BEFORE}, OK),
    ({"if-match": '"x"', "if-unmodified-since": AFTER}, FAILED),
    ({"if-none-match": '"e"', "if-modified-since": BEFORE}, SAME),
    ({"if-none-match": '"x"', "if-modified-since": AFTER}, OK),
    ({"if-match": '"x"', "if-none-match": '"e"'}, FAILED),
    ({"if-match": '"e"', "if-none-match": '"e"'}, SAME),
    ({"if-unmodified-since": BEFORE, "if-none-match": '"e"'}, FAILED),
]


@pytest.mark.parametrize(("headers", "status"), READS, ids=str)
def test_conditions_of_reads(headers: dict[str, str], status: int) -> None:
    found = conditions.from_headers(request("/b/k", headers=headers))
    assert bool(found) == any(text not in ("soon", "never") for text in headers.values())
    assert status_of(conditions.check_read, found, "e", THEN_S) == status


@pytest.mark.parametrize(("headers", "status"), READS, ids=str)
def test_conditions_of_a_copy_source(headers: dict[str, str], status: int) -> None:
    named = {f"x-amz-copy-source-{name}": value for name, value in headers.items()}
    found = conditions.from_headers(request("/b/k", headers=named), b"x-amz-copy-source-")
    expected = FAILED if status == SAME else status
    assert status_of(conditions.check_source, found, "e", THEN_S) == expected
    assert not conditions.from_headers(request("/b/k", headers=named))


def test_not_modified_carries_the_etag() -> None:
    with pytest.raises(S3Error) as caught:
        conditions.check_read(Conditions(if_none_match=("e",)), "e", THEN_S)
    assert caught.value.headers == {"ETag": '"e"', "Last-Modified": THEN}


@pytest.mark.parametrize(
    ("headers", "present", "absent"),
    [
        ({}, OK, OK),
        ({"if-none-match": "*"}, FAILED, OK),
        ({"if-none-match": '"e"'}, FAILED, OK),
        ({"if-none-match": '"x"'}, OK, OK),
        ({"if-match": '"e"', "if-none-match": '"x"'}, OK, 404),
        ({"if-match": '"e"'}, OK, 404),
        ({"if-match": '"x"'}, FAILED, 404),
        ({"if-match": "*"}, OK, 404),
        ({"if-match": '"e"', "if-none-match": "*"}, FAILED, 404),
        ({"if-modified-since": THEN}, 501, 501),
        ({"if-unmodified-since": THEN}, 501, 501),
    ],
    ids=str,
)
def test_conditions_of_writes(headers: dict[str, str], present: int, absent: int) -> None:
    found = conditions.from_headers(request("/b/k", "PUT", headers=headers))
    assert status_of(conditions.check_write, found, "e") == present
    assert status_of(conditions.check_write, found, None) == absent


@pytest.mark.parametrize(
    ("headers", "present", "absent"),
    [
        ({}, OK, OK),
        ({"if-match": '"e"'}, OK, 404),
        ({"if-match": '"x"'}, FAILED, 404),
        ({"x-amz-if-match-size": "7"}, OK, OK),
        ({"x-amz-if-match-size": "8"}, FAILED, OK),
        ({"x-amz-if-match-size": "-1"}, 400, 400),
        ({"x-amz-if-match-last-modified-time": THEN}, OK, OK),
        ({"x-amz-if-match-last-modified-time": "2026-01-02T03:04:05Z"}, OK, OK),
        ({"x-amz-if-match-last-modified-time": BEFORE}, FAILED, OK),
        ({"x-amz-if-match-last-modified-time": "yesterday"}, 400, 400),
        ({"if-match": "*", "x-amz-if-match-size": "7", "x-amz-if-match-last-modified-time": THEN}, OK, 404),
        (
            {"if-match": "*", "x-amz-if-match-size": "8", "x-amz-if-match-last-modified-time": THEN},
            FAILED,
            404,
        ),
    ],
    ids=str,
)
def test_conditions_of_deletions(headers: dict[str, str], present: int, absent: int) -> None:
    def check(etag: str | None) -> None:
        found = conditions.of_deletion(request("/b/k", "DELETE", headers=headers))
        conditions.check_deletion(found, etag, 7, THEN_S)

    assert status_of(check, "e") == present
    assert status_of(check, None) == absent


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "BadRequest"),
        ({"origin": "http://a.example"}, "BadRequest"),
        ({"origin": "http://a.example", "access-control-request-method": "GET"}, "AccessForbidden"),
    ],
)
def test_preflight_requests(headers: dict[str, str], code: str) -> None:
    with pytest.raises(S3Error) as caught:
        routing.refuse_unsigned(request("/b/k", "OPTIONS", headers=headers))
    assert caught.value.code == code
    routing.refuse_unsigned(request("/b/k", "GET"))


def test_too_many_etags() -> None:
    with pytest.raises(S3Error):
        conditions.from_headers(request("/b/k", headers={"if-match": "," * 64}))


@given(st.text(st.characters(max_codepoint=0xFF), max_size=50), st.sampled_from([name for name, _ in (
    ("if-match", 0), ("if-none-match", 0), ("if-modified-since", 0), ("if-unmodified-since", 0))]))  # fmt: skip
def test_any_condition_is_read(text: str, name: str) -> None:
    found = conditions.from_headers(request("/b/k", headers={name: text}))
    assert status_of(conditions.check_read, found, "e", THEN_S) in (OK, FAILED, SAME)


# --- ranges ------------------------------------------------------------------------------------------------------
WHOLE = "whole"
UNSATISFIABLE = "416"


@pytest.mark.parametrize(
    ("header", "size", "found"),
    [
        (None, 10, WHOLE),
        ("bytes=0-9", 10, Span(0, 10)),
        ("bytes=0-0", 10, Span(0, 1)),
        ("bytes=9-9", 10, Span(9, 10)),
        ("bytes=5-", 10, Span(5, 10)),
        ("bytes=-3", 10, Span(7, 10)),
        ("bytes=-30", 10, Span(0, 10)),
        ("bytes=0-52428799", 10, Span(0, 10)),
        ("bytes=0-" + "9" * 90, 10, Span(0, 10)),
        ("Bytes=01-2", 10, Span(1, 3)),
        ("bytes= -1", 10, WHOLE),
        ("bytes=0 -1", 10, WHOLE),
        ("bytes=10-", 10, UNSATISFIABLE),
        ("bytes=10-20", 10, UNSATISFIABLE),
        ("bytes=-0", 10, UNSATISFIABLE),
        ("bytes=0-", 0, UNSATISFIABLE),
        ("bytes=-1", 0, UNSATISFIABLE),
        ("bytes=0-0", 0, UNSATISFIABLE),
        ("bytes=5-2", 10, WHOLE),
        ("bytes=0-1,3-4", 10, WHOLE),
        ("bytes=-", 10, WHOLE),
        ("bytes=", 10, WHOLE),
        ("bytes=a-b", 10, WHOLE),
        ("bytes=1--2", 10, WHOLE),
        ("bytes=+1-2", 10, WHOLE),
        ("bytes=١-٢", 10, WHOLE),
        ("items=0-1", 10, WHOLE),
        ("0-1", 10, WHOLE),
        ("", 10, WHOLE),
    ],
)
def test_ranges(header: str | None, size: int, found: object) -> None:
    if found == UNSATISFIABLE:
        with pytest.raises(S3Error) as caught:
            ranges.parse(header, size)
        assert (caught.value.code, caught.value.status) == ("InvalidRange", 416)
        assert caught.value.headers == {"Content-Range": f"bytes */{size}"}
    else:
        assert ranges.parse(header, size) == (None if found == WHOLE else found)


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 60))
def test_a_range_is_a_slice(size: int, first: int, last: int) -> None:
    data = bytes(range(size))
    for header, expected in (
        (f"bytes={first}-{last}", data[first : last + 1] if first <= last else data),
        (f"bytes={first}-", data[first:]),
        (f"bytes=-{last}", data[max(size - last, 0) :] if last else b""),
    ):
        try:
            span = ranges.parse(header, size)
        except S3Error:
            assert expected == b""
        else:
            assert (data if span is None else data[span.start : span.end]) == expected
            if span is not None:
                assert span.size_bytes == len(expected) > 0
                assert ranges.content_range(span, size) == f"bytes {span.start}-{span.end - 1}/{size}"


@given(st.text(max_size=30), st.integers(0, 100))
def test_any_range_lies_within_the_object(text: str, size: int) -> None:
    if status_of(ranges.parse, f"bytes={text}", size) == OK:
        span = ranges.parse(f"bytes={text}", size)
        assert span is None or 0 <= span.start < span.end <= size


def test_parts() -> None:
    assert ranges.of_part((5, 5, 3), 2, 13) == Span(5, 10)
    assert ranges.of_part((5, 5, 3), 3, 13) == Span(10, 13)
    assert ranges.of_part((), 1, 13) == Span(0, 13)
    assert ranges.of_part((), 1, 0) == Span(0, 0)
    for sizes, number in (((5, 5, 3), 4), ((), 2), ((), 0)):
        with pytest.raises(S3Error) as caught:
            ranges.of_part(sizes, number, 13)
        assert (caught.value.code, caught.value.status) == ("InvalidPartNumber", 416)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (None, Span(0, 10)),
        ("bytes=0-9", Span(0, 10)),
        ("bytes=3-3", Span(3, 4)),
        ("bytes=0-10", None),
        ("bytes=10-10", None),
        ("bytes=3-2", None),
        ("bytes=3-", None),
        ("bytes=-3", None),
        ("bytes=0-1,2-3", None),
        ("0-1", None),
    ],
)
def test_ranges_of_copies(header: str | None, found: Span | None) -> None:
    if found is None:
        with pytest.raises(S3Error) as caught:
            ranges.of_copy(header, 10)
        assert caught.value.code == "InvalidArgument"
    else:
        assert ranges.of_copy(header, 10) == found


# --- ETags -------------------------------------------------------------------------------------------------------
def test_etags() -> None:
    assert etag.multipart([bytes(16)]) == "4ae71336e44bf9bf79d2752e234818a5-1"
    assert etag.opaque(b"1") != etag.opaque(b"2")
    assert etag.opaque(b"1").endswith("-1")
    assert len(etag.opaque(b"1")) == 34
    for text in ('"e"', "e", 'W/"e"', ' "e" '):
        assert etag.unquote(text) == "e"
    assert etag.unquote(etag.quote("a-1")) == "a-1"
    assert etag.unquote('"') == '"'

"""Addresses and routes of requests at the S3 door: tables, and properties on any input."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol import routing
from gateway.protocol.action import Action, CopySource, Operation
from gateway.protocol.addressing import Address, resolve
from gateway.protocol.errors import S3Error
from gateway.protocol.routing import BUCKET_CONFIGURATIONS, route
from tests.support.s3 import request
from tests.support.s3_refusals import OK, status_of

KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)


def action(target: str, method: str = "GET", headers: dict[str, str | bytes] | None = None) -> Action:
    made = request(target, method, headers=headers)
    return route(made, resolve(made))


def refusal(target: str, method: str = "GET", headers: dict[str, str | bytes] | None = None) -> S3Error:
    with pytest.raises(S3Error) as caught:
        action(target, method, headers)
    return caught.value


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

"""Errors and fixed answers of the S3 door: each failure of the store has a code, and the page about S3 has them all."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from gateway.operations.bucket_configurations import EMPTY, MISSING
from gateway.protocol.action import Operation
from gateway.protocol.errors import CODES, S3Error, from_kvfs
from gateway.protocol.routing import BUCKET_CONFIGURATIONS
from kvfs import errors

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

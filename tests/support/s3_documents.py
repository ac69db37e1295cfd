"""Documents of the S3 door as botocore knows their operations.

Responsibility: what boto3 makes of an answer; keys and an ETag that several tests share.

Concurrency: one test's thread.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from botocore.model import OperationModel
from botocore.parsers import create_parser
from botocore.session import get_session
from hypothesis import strategies as st

TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
KEYS = st.text(TEXT, min_size=1, max_size=20)
ETAG = "d41d8cd98f00b204e9800998ecf8427e"


@lru_cache
def operation(name: str) -> OperationModel:
    return get_session().get_service_model("s3").operation_model(name)


def read(name: str, body: bytes) -> dict[str, Any]:
    """What boto3 makes of an answer."""
    answer = {"status_code": 200, "headers": {}, "body": body, "context": {}}
    found: dict[str, Any] = create_parser("rest-xml").parse(answer, operation(name).output_shape)
    return found

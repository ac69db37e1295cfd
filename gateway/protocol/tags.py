"""Tags of objects and buckets: what a header says, and what S3 allows.

Concurrency: pure functions.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl

from gateway.protocol.errors import S3Error, argument
from gateway.protocol.request import is_escaped
from kvfs.limits import MAX_TAG_KEY_CHARACTERS, MAX_TAG_VALUE_CHARACTERS, MAX_TAGS

_TAG_TEXT: Final = re.compile(r"[\w\s+\-=.:/@]*\Z")


def parse_header(text: str) -> dict[str, str]:
    """Parse `x-amz-tagging: a=1&b=2`. Raises S3Error InvalidArgument, InvalidTag, BadRequest (more than 10)."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_TAGS + 1)
    except ValueError:
        pairs = [("", "")]
    keys = [key for key, _ in pairs]
    if "" in keys or len(set(keys)) != len(keys) or not is_escaped(text):
        raise argument("x-amz-tagging", text, "Tags in a header are query parameters, each key once")
    return check(pairs, MAX_TAGS)


def check(pairs: list[tuple[str, str]], most: int) -> dict[str, str]:
    """Check tags, and return them as a mapping. Raises S3Error InvalidTag, BadRequest (more than `most`)."""
    if len(pairs) > most:
        raise S3Error("BadRequest", f"{len(pairs)} tags: at most {most} are possible.")
    tags: dict[str, str] = {}
    for key, value in pairs:
        if key in tags:
            raise S3Error("InvalidTag", "A tag key is given twice.", detail={"TagKey": key})
        named = 1 <= len(key) <= MAX_TAG_KEY_CHARACTERS and not key.lower().startswith("aws:")
        if not named or not _TAG_TEXT.match(key):
            raise S3Error("InvalidTag", "The key of a tag is invalid.", detail={"TagKey": key})
        if len(value) > MAX_TAG_VALUE_CHARACTERS or not _TAG_TEXT.match(value):
            raise S3Error("InvalidTag", "The value of a tag is invalid.", detail={"TagValue": value})
        tags[key] = value
    return tags

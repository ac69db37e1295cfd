"""`POST /BUCKET?match`: how many blocks of a chain of prefix hashes are there, in a bucket bound to a namespace.

The body is JSON, `{"hashes": ["<32 hex>", ...]}`, at most limits.MAX_MATCH_HASHES; the answer `{"hits": N}` counts
them without a gap from the first on. Concurrency: one task per call.
"""

from __future__ import annotations

import json

from gateway.calls import Answer, Call
from gateway.errors import S3Error
from kvfs import limits


async def match(call: Call) -> Answer:
    bucket = await call.backend.bucket(call.bucket)
    if bucket.namespace is None:
        raise S3Error("InvalidRequest", f"The bucket {bucket.name} is bound to no namespace.")
    hits = await call.backend.match(bucket, _hashes(await call.read_document()))
    return Answer(200, [("Content-Type", "application/json")], json.dumps({"hits": hits}).encode())


def _hashes(body: bytes) -> list[bytes]:
    try:
        texts = json.loads(body)["hashes"]
        if len(texts) > limits.MAX_MATCH_HASHES:
            raise S3Error("InvalidArgument", f"At most {limits.MAX_MATCH_HASHES} hashes are matched at once.")
        found = [bytes.fromhex(text) for text in texts]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise S3Error("InvalidRequest", 'The body is to be {"hashes": ["<32 hex digits>", ...]}.') from None
    if any(len(digest) != 16 for digest in found):
        raise S3Error("InvalidRequest", "A prefix hash has 32 hex digits.")
    return found

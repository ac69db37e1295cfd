"""`POST /BUCKET?match`: how many blocks of a chain of prefix hashes are there, in a bucket bound to a namespace.

The answer counts them without a gap from the first on. Concurrency: one task per call.
"""

from __future__ import annotations

from gateway.call.call import Answer, Call
from gateway.call.receive import read_document
from gateway.protocol.errors import S3Error
from gateway.xml import requests, responses


async def match(call: Call) -> Answer:
    """Answer how many blocks of a chain are there, as JSON. Raises S3Error where the bucket has no namespace."""
    bucket = await call.backend.bucket(call.bucket)
    if bucket.namespace is None:
        raise S3Error("InvalidRequest", f"The bucket {bucket.name} is bound to no namespace.")
    async with read_document(call, requests.match()) as digests:
        hits = await call.backend.match(bucket, digests)
    return Answer(200, [("Content-Type", "application/json")], responses.match_result(hits))

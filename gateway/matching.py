"""`POST /BUCKET?match`: how many blocks of a chain of prefix hashes are there, in a bucket bound to a namespace.

The answer counts them without a gap from the first on. Concurrency: one task per call.
"""

from __future__ import annotations

from gateway import bodies, documents
from gateway.calls import Answer, Call
from gateway.errors import S3Error


async def match(call: Call) -> Answer:
    bucket = await call.backend.bucket(call.bucket)
    if bucket.namespace is None:
        raise S3Error("InvalidRequest", f"The bucket {bucket.name} is bound to no namespace.")
    async with call.read(bodies.match()) as digests:
        hits = await call.backend.match(bucket, digests)
    return Answer(200, [("Content-Type", "application/json")], documents.match_result(hits))

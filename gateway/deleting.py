"""DeleteObjects: up to 1,000 keys in one request, each with an outcome of its own. Concurrency: one task per call."""

from __future__ import annotations

from gateway import bodies, checksums, documents
from gateway.addressing import check_key
from gateway.bodies import DeleteClaim, DeleteRequest
from gateway.calls import Answer, Call, Document
from gateway.conditions import Conditions
from gateway.errors import S3Error, from_kvfs
from gateway.routing import check_version
from gateway.writing import expected_of

_Outcome = tuple[str, str | None]


async def delete_objects(call: Call) -> Answer:
    await call.backend.bucket(call.bucket)
    wanted = checksums.wanted(call.request)
    if wanted.md5 is None and wanted.digest is None and not wanted.trailer:
        raise S3Error(
            "InvalidRequest", "Missing required header for this request: Content-MD5 OR x-amz-checksum-*"
        )
    async with call.read(bodies.delete()) as request:
        return await _delete_all(call, request)


async def _delete_all(call: Call, request: DeleteRequest) -> Answer:
    """Those whose conditions hold, in as few requests to the service as they take."""
    failed: list[tuple[str, str | None, S3Error]] = []
    wanted: list[tuple[DeleteClaim, int | None]] = []
    for claim in request.objects:
        try:
            wanted.append((claim, await _expected(call, claim)))
        except S3Error as error:
            # Its traceback would keep this call, and the call the error, until the collector comes by.
            failed.append((claim.key, claim.version_id, error.with_traceback(None)))
    pairs = [(claim.key, expected_id) for claim, expected_id in wanted]
    deleted: list[_Outcome] = []
    outcomes = await call.backend.remove_many(call.bucket, pairs)
    for (claim, _), outcome in zip(wanted, outcomes, strict=True):
        if outcome is None:
            deleted.append((claim.key, claim.version_id))
        else:
            why = from_kvfs(outcome, f"{call.bucket}/{claim.key}")
            failed.append((claim.key, claim.version_id, why))
    return Document(200, (), documents.delete_result([] if request.quiet else deleted, failed))


async def _expected(call: Call, claim: DeleteClaim) -> int | None:
    """The object that it must be, if it says so. Raises S3Error."""
    if claim.version_id is not None:
        check_version(claim.version_id)
    check_key(claim.key)
    wanted = Conditions(
        () if claim.etag is None else (claim.etag,), size_bytes=claim.size_bytes, modified_s=claim.modified_s
    )
    return await expected_of(call, call.bucket, claim.key, wanted)

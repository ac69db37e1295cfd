"""DeleteObjects: up to 1,000 keys in one request, each with an outcome of its own. Concurrency: one task per call."""

from __future__ import annotations

from gateway import bodies, checksums, documents
from gateway.bodies import DeleteClaim, DeleteRequest
from gateway.calls import Answer, Call, Document
from gateway.conditions import Conditions
from gateway.errors import S3Error, from_kvfs
from gateway.routing import check_version
from gateway.writing import remove_key
from kvfs import limits
from kvfs.errors import BucketNotFound, KvfsError

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
    deleted: list[_Outcome] = []
    failed: list[tuple[str, str | None, S3Error]] = []
    for claim in request.objects:
        try:
            await _delete(call, claim)
        except S3Error as error:
            # Its traceback would keep this call, and the call the error, until the collector comes by.
            failed.append((claim.key, claim.version_id, error.with_traceback(None)))
        except BucketNotFound:
            raise
        except KvfsError as error:
            failed.append((claim.key, claim.version_id, from_kvfs(error, f"{call.bucket}/{claim.key}")))
        else:
            deleted.append((claim.key, claim.version_id))
    return Document(200, (), documents.delete_result([] if request.quiet else deleted, failed))


async def _delete(call: Call, claim: DeleteClaim) -> None:
    if claim.version_id is not None:
        check_version(claim.version_id)
    if len(claim.key.encode()) > limits.MAX_KEY_BYTES:
        raise S3Error("KeyTooLongError")
    wanted = Conditions(
        () if claim.etag is None else (claim.etag,), size_bytes=claim.size_bytes, modified_s=claim.modified_s
    )
    await remove_key(call, call.bucket, claim.key, wanted)

"""DeleteObjects: up to 1,000 keys in one request, each with an outcome of its own. Concurrency: one task per call."""

from __future__ import annotations

import logging

from gateway.call.call import Answer, Call, document_answer
from gateway.call.receive import read_document
from gateway.operations.put_object import expected_of
from gateway.protocol import checksums
from gateway.protocol.addressing import check_key
from gateway.protocol.conditions import Conditions
from gateway.protocol.errors import S3Error, from_kvfs
from gateway.protocol.routing import check_version
from gateway.xml import requests, responses
from gateway.xml.requests import DeleteRequest, ObjectReference

log = logging.getLogger("kvfs.gateway")

_Outcome = tuple[str, str | None]


async def delete_objects(call: Call) -> Answer:
    """Answer DeleteObjects. Raises S3Error without a digest of the document."""
    await call.backend.bucket(call.bucket)
    wanted = checksums.wanted(call.request)
    if wanted.md5 is None and wanted.digest is None and not wanted.trailer:
        raise S3Error(
            "InvalidRequest", "Missing required header for this request: Content-MD5 OR x-amz-checksum-*"
        )
    async with read_document(call, requests.delete()) as request:
        return await _delete_all(call, request)


async def _delete_all(call: Call, request: DeleteRequest) -> Answer:
    """Delete what meets its conditions, in as few requests to the service as it takes."""
    failed: list[tuple[str, str | None, S3Error]] = []
    wanted: list[tuple[ObjectReference, int | None]] = []
    for each in request.objects:
        try:
            wanted.append((each, await _expected(call, each)))
        except S3Error as error:
            # Its traceback would keep this call, and the call the error, until the collector comes by.
            failed.append((each.key, each.version_id, error.with_traceback(None)))
    pairs = [(each.key, expected_id) for each, expected_id in wanted]
    deleted: list[_Outcome] = []
    outcomes = await call.backend.remove_many(call.bucket, pairs)
    for (each, _), outcome in zip(wanted, outcomes, strict=True):
        if outcome is None:
            deleted.append((each.key, each.version_id))
        else:
            why = from_kvfs(outcome, f"{call.bucket}/{each.key}")
            if why.status >= 500:
                # The answer, a 200, says nothing of its cause; the service's log has the trace of that.
                log.error("request %s: %s", call.request_id, outcome, exc_info=outcome)
            failed.append((each.key, each.version_id, why))
    return document_answer(200, (), responses.delete_result([] if request.quiet else deleted, failed))


async def _expected(call: Call, each: ObjectReference) -> int | None:
    """Find the object that it must be, if it says so. Raises S3Error."""
    if each.version_id is not None:
        check_version(each.version_id)
    check_key(each.key)
    wanted = Conditions(
        () if each.etag is None else (each.etag,), size_bytes=each.size_bytes, modified_s=each.modified_s
    )
    return await expected_of(call, each.key, wanted)

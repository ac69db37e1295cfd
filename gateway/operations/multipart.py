"""Multipart uploads: create, parts, listings, abort. Completion is `gateway.operations.complete_multipart`.

Responsibility: the requests of an upload under way. A part is received like an object and kept by
`gateway.operations.uploads`.

Invariants: a part that comes while its upload is completed or aborted is not left behind. Concurrency: one task per
call; requests of one upload may reach different workers.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from gateway.backend import reserved_bucket
from gateway.backend.drafts import Seal
from gateway.backend.lookup import ObjectLookup
from gateway.call import large_transfer
from gateway.call.body_plan import object_bytes
from gateway.call.call import Answer, Call, document_answer
from gateway.call.large_transfer import WindowSink
from gateway.call.object_view import stored
from gateway.call.receive import Received, receive
from gateway.call.sinks import DraftSink
from gateway.operations.copy_object import CopyPlan, open_source, seal_copy
from gateway.operations.put_object import check_size, is_large, with_digests
from gateway.operations.uploads import Upload, need_upload, new_upload_id, sealed_of, uploads_of
from gateway.protocol import checksums, list_pages, metadata, ranges
from gateway.protocol import etag as etags
from gateway.protocol.checksums import Algorithm, ChecksumType
from gateway.protocol.errors import S3Error
from gateway.protocol.list_pages import ListRequest
from gateway.protocol.metadata import ObjectMetadata
from gateway.xml import listings, responses
from gateway.xml.items import PartItem, UploadItem
from kvfs.errors import Exists


async def create(call: Call) -> Answer:
    """Answer CreateMultipartUpload: write the upload's record."""
    await call.backend.bucket(call.bucket)
    await call.uploads.begin(call.owner)
    said = replace(metadata.from_request(call.request), owner=call.owner)
    algorithm, type_ = checksums.asked(call.request)
    now_ns = time.time_ns()
    upload = Upload(new_upload_id(now_ns), call.bucket, call.key, call.owner, now_ns, said, algorithm, type_)
    await upload.save(call.backend)
    headers = []
    if algorithm is not None and type_ is not None:
        headers = [("x-amz-checksum-algorithm", algorithm.value), ("x-amz-checksum-type", type_.value)]
    return document_answer(
        200, headers, responses.initiate_multipart_upload(call.bucket, call.key, upload.upload_id)
    )


# --- parts -------------------------------------------------------------------------------------------------
async def upload_part(call: Call) -> Answer:
    """Answer UploadPart."""
    upload = await need_upload(call.backend, call.action.upload_id, call.bucket, call.key)
    await upload.touch(call.backend, call.settings.upload_expiry_s)
    size_bytes = object_bytes(call)
    wanted = checksums.wanted(call.request)
    _check_algorithm(upload, wanted.algorithm)
    check_size(call, size_bytes, "part")
    algorithm = wanted.algorithm or upload.algorithm
    receive_part = _receive_large if is_large(call, size_bytes) else _receive_small
    received, etag, object_id = await receive_part(call, upload, size_bytes, algorithm)
    await _need_still(call, upload, object_id)
    headers = [("ETag", etags.quote(etags.of_object(etag, object_id)))]
    if received.checksum is not None:
        headers.append((received.checksum.algorithm.header, received.checksum.text))
    return Answer(200, headers)


_Part = tuple[Received, str, int]
"""A part as it was sealed: what was received, its ETag if it has an MD5, and its id."""


async def _receive_small(call: Call, upload: Upload, size_bytes: int, algorithm: Algorithm | None) -> _Part:
    async with call.backend.drafts.reserved(call.owner, size_bytes, call.body) as draft:
        took_md5 = call.settings.takes_md5(call.bucket)
        received = await receive(call, DraftSink(draft), take_md5=took_md5, algorithm=algorithm)
        said = with_digests(ObjectMetadata(), received, took_md5)
        seal = replace(_part_seal(call, upload, said), checksum=received.xxh3)
        return received, said.etag, await call.backend.drafts.seal(draft, seal)


async def _receive_large(call: Call, upload: Upload, _: int, algorithm: Algorithm | None) -> _Part:
    """Receive a part that no slot holds."""
    async with large_transfer.writing(
        call.backend, call.owner, reserved_bucket.BUCKET, call.body
    ) as transfer:
        took_md5 = call.settings.takes_md5(call.bucket)
        received = await receive(call, WindowSink(transfer), take_md5=took_md5, algorithm=algorithm)
        said = with_digests(ObjectMetadata(), received, took_md5)
        return received, said.etag, await transfer.seal(_part_seal(call, upload, said))


async def upload_part_copy(call: Call) -> Answer:
    """Answer UploadPartCopy."""
    upload = await need_upload(call.backend, call.action.upload_id, call.bucket, call.key)
    await upload.touch(call.backend, call.settings.upload_expiry_s)
    async with open_source(call) as source:
        header = call.request.header(b"x-amz-copy-source-range")
        span = ranges.of_copy(header, source.what.size_bytes)
        check_size(call, span.size_bytes, "part")
        plan = CopyPlan(source, span, call.settings.takes_md5(call.bucket), upload.algorithm)
        said = ObjectMetadata()
        part = await seal_copy(call, plan, said, _part_seal(call, upload, said))
    await _need_still(call, upload, part.object_id)
    return document_answer(
        200, (), responses.copy_result(part.etag, part.mtime_ns, part.said.checksum, of_part=True)
    )


def _part_seal(call: Call, upload: Upload, said: ObjectMetadata) -> Seal:
    assert call.action.part_number is not None
    return Seal(reserved_bucket.BUCKET, upload.part_key(call.action.part_number), said.encode())


async def _need_still(call: Call, upload: Upload, object_id: int) -> None:
    """Remove a part that was sealed after its upload had ended, and raise S3Error NoSuchUpload."""
    assert call.action.part_number is not None
    try:
        await need_upload(call.backend, upload.upload_id, call.bucket, call.key)
    except S3Error:
        with suppress(Exists):
            key = upload.part_key(call.action.part_number)
            await call.backend.remove(reserved_bucket.BUCKET, key, expected_id=object_id)
        raise


def _check_algorithm(upload: Upload, algorithm: Algorithm | None) -> None:
    """Check that a part comes with the checksum that the upload needs, unless it can be taken here.

    Raises S3Error InvalidRequest.
    """
    wanted = upload.algorithm
    if wanted is None or wanted is algorithm:
        return
    if algorithm is None and upload.checksum_type is not ChecksumType.COMPOSITE:
        return
    found = "none" if algorithm is None else algorithm.value
    raise S3Error(
        "InvalidRequest", f"The upload was begun with {wanted.value} checksums, the part has {found}."
    )


async def abort(call: Call) -> Answer:
    """Answer AbortMultipartUpload. Raises S3Error NoSuchUpload for one that is over."""
    upload = await need_upload(call.backend, call.action.upload_id, call.bucket, call.key)
    was_there = await upload.remove(call.backend)
    if not was_there or await sealed_of(call.backend, upload.upload_id, call.bucket, call.key) is not None:
        raise S3Error("NoSuchUpload", detail={"UploadId": upload.upload_id})
    return Answer(204)


# --- listings ----------------------------------------------------------------------------------------------
async def list_parts(call: Call) -> Answer:
    """Answer ListParts."""
    upload = await need_upload(call.backend, call.action.upload_id, call.bucket, call.key)
    arguments = call.action.arguments
    marker = list_pages.parse_number(arguments, "part-number-marker")
    most = list_pages.parse_limit(arguments, "max-parts")
    parts = [(each, found) for each, found in (await upload.parts(call.backend)).items() if each > marker]
    body = listings.list_parts(
        call.bucket,
        upload_item(upload),
        [part_item(each, found) for each, found in parts[:most]],
        marker=marker,
        max_parts=most,
        truncated=len(parts) > most,
        encoding_url=arguments.get("encoding-type") == "url",
    )
    return document_answer(200, (), body)


def part_item(each: int, found: ObjectLookup) -> PartItem:
    """Describe a part as listings show it."""
    what = stored(found)
    return PartItem(each, found.size_bytes, what.etag, found.mtime_ns, what.metadata.checksum)


async def list_uploads(call: Call) -> Answer:
    """Answer ListMultipartUploads."""
    await call.backend.bucket(call.bucket)
    request = list_pages.parse_uploads(call.action.arguments)
    id_marker = call.action.arguments.get("upload-id-marker", "") if request.marker else ""
    found = await uploads_of(call.backend, call.bucket)
    shown, prefixes, truncated = page_of(found, request, id_marker)
    body = listings.list_multipart_uploads(
        call.bucket,
        request,
        [upload_item(each) for each in shown],
        prefixes,
        upload_id_marker=id_marker,
        truncated=truncated,
    )
    return document_answer(200, (), body)


def upload_item(upload: Upload) -> UploadItem:
    """Describe an upload as listings show it."""
    return UploadItem(
        upload.key,
        upload.upload_id,
        upload.initiated_ns,
        upload.owner,
        upload.algorithm,
        upload.checksum_type,
    )


def page_of(
    found: list[Upload], request: ListRequest, id_marker: str
) -> tuple[list[Upload], list[str], bool]:
    """Return the uploads and common prefixes of one page of sorted uploads, and whether more follow."""
    shown: list[Upload] = []
    prefixes: list[str] = []
    for upload in found:
        past = upload.key > request.after or not request.after
        if not past and (upload.key != request.after or not id_marker or upload.upload_id <= id_marker):
            continue
        if not upload.key.startswith(request.prefix):
            continue
        cut = upload.key.find(request.delimiter, len(request.prefix)) if request.delimiter else -1
        common = upload.key[: cut + len(request.delimiter)] if cut >= 0 else None
        if common is not None and (common in prefixes or request.after.startswith(common)):
            continue
        if len(shown) + len(prefixes) >= request.max_keys:
            return shown, prefixes, request.max_keys > 0
        if common is None:
            shown.append(upload)
        else:
            prefixes.append(common)
    return shown, prefixes, False

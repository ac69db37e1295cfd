"""The OpenAPI document of the Conductor, made of its operations.

Responsibility: paths, bodies and answers as JSON schemas. Concurrency: pure functions.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

from kvfs.limits import MAX_NAME_BYTES
from scheduler.conductor.door.mooncake import ALL_OPERATIONS
from scheduler.conductor.door.operations import ErrorAnswer, Operation
from scheduler.conductor.values import Refused

FIXED = {
    "/": ("Show the page that watches", "text/html"),
    "/healthz": ("Say that the service is there", "text/plain"),
    "/metrics": ("Return the metrics, as Prometheus reads them", "text/plain"),
    "/openapi.json": ("Return this document", "application/json"),
    "/v1/events": ("Stream panels and decisions as they change", "text/event-stream"),
}
"""What is there to GET beside the operations, and what it answers."""
OPEN = frozenset(("/", "/healthz"))
"""Those of them that want no token."""
_ALWAYS = (400, 401, 411, 413, 503)
"""Statuses that any operation may answer with."""
_LINKED = {
    "route": ("id", ("prefilled", "prefill_failed", "first_token", "done", "cancel", "explain")),
    "add_instance": ("name", ("drain_instance", "set_role", "unreachable", "remove_instance")),
}
"""Operations that give what others take in their path: its name, and which."""


def document(*, secured: bool) -> dict[str, Any]:
    """Return the document as JSON values; `secured`: whether a token is wanted."""
    types = {
        each for operation in ALL_OPERATIONS for each in (operation.body, operation.answer) if _is_named(each)
    }
    ordered = sorted({*types, Refused, ErrorAnswer}, key=lambda each: str(each.__name__))
    _, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for operation in ALL_OPERATIONS:
        path = paths.setdefault(operation.path.replace("{}", f"{{{parameter(operation)}}}"), {})
        path[operation.method.lower()] = _described(operation)
    paths |= {path: {"get": _described_fixed(path, *about)} for path, about in FIXED.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvfs conductor", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}] if secured else [],
    }


def parameter(operation: Operation) -> str:
    """Return the name of a path's argument."""
    return "name" if operation.path.startswith("/v1/instances") else "id"


def _is_named(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _reference(kind: Any, *, packs: bool = False) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"} if _is_named(kind) else {"type": "object"}
    types = ("application/json", "application/msgpack") if packs else ("application/json",)
    return {each: {"schema": schema} for each in types}


def _described(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.text,
        "responses": {
            str(status): _response(operation, status) for status in (*operation.statuses, *_ALWAYS)
        },
    }
    if "{}" in operation.path:
        schema = {"type": "string", "maxLength": MAX_NAME_BYTES}
        argument = {"name": parameter(operation), "in": "path", "required": True, "schema": schema}
        described["parameters"] = [argument]
    if operation.body is not None:
        content = _reference(operation.body, packs=operation.packs)
        described["requestBody"] = {"required": not operation.optional_body, "content": content}
    return described


def _described_fixed(path: str, text: str, answer: str) -> dict[str, Any]:
    refused = {"content": _reference(ErrorAnswer)}
    responses = {
        "200": {"description": HTTPStatus(200).phrase, "content": {answer: {"schema": {}}}},
        **{str(status): {"description": HTTPStatus(status).phrase, **refused} for status in _ALWAYS},
    }
    return {"summary": text, "responses": responses, **({"security": []} if path in OPEN else {})}


def _response(operation: Operation, status: int) -> dict[str, Any]:
    found: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if status == 429:
        found["content"] = _reference(Refused)
        found["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    elif status >= 400:
        found["content"] = _reference(ErrorAnswer)
    elif operation.answer is not None:
        found["content"] = _reference(operation.answer, packs=operation.packs)
    if operation.name in _LINKED and status in (200, 201):
        source, names = _LINKED[operation.name]
        found["links"] = {
            name: {"operationId": name, "parameters": {source: f"$response.body#/{source}"}} for name in names
        }
    return found

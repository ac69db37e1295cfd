"""The JSON bodies of OpenAI's completions: what the proxy reads of them, and how it changes them.

Responsibility: take a body apart into its top-level members without decoding these (138 KB in 38 us), and put it
together with some dropped and some added.

Invariants: what only engines may say to each other (`ENGINE_FIELDS`) never comes through from a client: it names hosts
that an engine connects to. Of a member that occurs twice the last counts, here and for the engine.

Concurrency: pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

Buffer = bytes | bytearray | memoryview
Members = dict[str, msgspec.Raw]
T = TypeVar("T")

_MEMBERS = msgspec.json.Decoder(Members)
_ENCODER = msgspec.json.Encoder()
_PROMPTS = re.compile(rb'\s*\[\s*["\[]').match
"""A list of prompts; one of numbers is one prompt."""
ENGINE_FIELDS = frozenset(
    (
        *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
        *("disagg_request_id", "disagg_prefill_dp_rank", "decode_tp_size"),
        *("routed_dp_rank", "data_parallel_rank"),
    )
)
"""Members by which a router joins a prefill and a decode engine, and names the data-parallel rank that is to work."""
_PREFILL_DROPS = frozenset(
    (
        *("n", "best_of", "use_beam_search", "max_completion_tokens", "min_tokens"),
        *("stream", "stream_options", "logprobs", "top_logprobs"),
        *("stop", "stop_token_ids", "bad_words", "include_stop_str_in_output"),
        *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
        *("guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern"),
    )
)
"""Members that shape the answer alone: the prefill engine's one token is thrown away."""


class BadBody(Exception):
    """A client's body is no JSON object, or a member is not what it must be."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Asked(msgspec.Struct, frozen=True):
    """What the proxy needs to know of a request for a completion."""

    model: str
    streams: bool
    wants_usage: bool
    """Whether a streamed answer is to end with its usage."""
    output_tokens: int
    one_engine: bool
    """Whether the answer has the prompt's own log probabilities or text, which are computed, never cached."""
    several: bool
    """Whether there is more than one answer."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_FORM_FIELD = re.compile(rb'name="model"').search
_FORM_VALUE = re.compile(rb"[^\r\n]{0,256}\r\n(?:[^\r\n]{1,256}\r\n){0,4}\r\n([^\r\n]{0,256})\r\n").match
"""What follows it: other headers of its part, an empty line. Bounded, since a client sends it."""
_NO_OPTIONS = _StreamOptions()
_DECODERS: dict[type[Any], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind | None) for kind in (bool, int, str, dict, _StreamOptions)
}


def parse(body: Buffer) -> Members:
    """Take a body apart, without what only engines may say. Raises BadBody."""
    try:
        members = _MEMBERS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the body must be a JSON object: {error}") from None
    if ENGINE_FIELDS.isdisjoint(members):
        return members
    return {name: value for name, value in members.items() if name not in ENGINE_FIELDS}


def passed(body: Buffer, content_type: bytes) -> tuple[str, Buffer]:
    """Return the model that a request names, in JSON or in a form (empty where it names none), and the body that goes
    to an engine, without what only engines may say. Raises BadBody."""
    if content_type.startswith(b"multipart/"):
        field = _FORM_FIELD(body)
        value = None if field is None else _FORM_VALUE(body, field.end())
        return "" if value is None else value[1].decode(errors="replace"), body
    if not body:
        return "", body
    members = parse(body)
    return member(members, "model", str) or "", patched(members, {})


def asked(members: Members) -> Asked:
    """Read what the proxy needs to know. Raises BadBody."""
    options = member(members, "stream_options", _StreamOptions) or _NO_OPTIONS
    tokens = member(members, "max_completion_tokens", int) or member(members, "max_tokens", int) or 0
    one_engine = member(members, "echo", bool) or member(members, "prompt_logprobs", int) is not None
    return Asked(
        member(members, "model", str) or "",
        member(members, "stream", bool) or False,
        bool(options.include_usage or options.continuous_usage_stats),
        tokens,
        bool(one_engine),
        _has_several_answers(members),
    )


def _has_several_answers(members: Members) -> bool:
    for name in ("n", "best_of"):
        if name in members and bytes(members[name]).strip() not in (b"1", b"null"):
            return True
    return "prompt" in members and (count_prompts(members) or 1) > 1


def count_prompts(members: Members) -> int | None:
    """Count the prompts of a list of them; None where the body has one prompt, which is in no list."""
    prompt = members.get("prompt")
    if prompt is None or not _PROMPTS(memoryview(prompt)):
        return None
    return len(msgspec.json.decode(prompt, type=list[msgspec.Raw]))


def member(members: Members, name: str, kind: type[T]) -> T | None:
    """Decode one member; None where it is missing or null. Raises BadBody."""
    raw = members.get(name)
    if raw is None:
        return None
    try:
        value: T | None = _DECODERS[kind].decode(raw)
        return value
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"{name}: {error}", name) from None


def patched(members: Members, put: Mapping[str, Any]) -> bytes:
    """Put a body together, with the members of `put`."""
    return _ENCODER.encode({**members, **put} if put else members)


def prefill_body(members: Members, put: Mapping[str, Any]) -> bytes:
    """Make the body that has an engine prefill the same prompt, and generate one token."""
    # Tools are part of the chat template, so they stay; the one token is to be no call of a tool.
    choice = {"tool_choice": "none"} if "tools" in members else {}
    kept = {name: value for name, value in members.items() if name not in _PREFILL_DROPS}
    return patched(kept, {**choice, **put, "max_tokens": 1})


def decode_body(members: Members, wanted: Asked, put: Mapping[str, Any]) -> bytes:
    """Make the body for the engine that answers: the client's, which also asks for the usage of a stream."""
    usage: dict[str, Any] = {}
    if wanted.streams and not wanted.wants_usage:
        options = member(members, "stream_options", dict) or {}
        usage = {"stream_options": {**options, "include_usage": True}}
    return patched(members, {**usage, **put} if usage else put)

"""The tokens of prompts, by which a router knows what is cached.

Responsibility: ask an engine's `/tokenize`, which knows the model's tokenizer and chat template, and remember what it
said. The next request of a conversation begins with the messages of the last one: it is routed by the tokens of these
at once, and its own are asked for afterwards, for the request after it.

Invariants: at most limits.TOKEN_CACHE_BYTES are remembered, the least recently used go first. Without an answer in
limits.TOKENIZE_TIMEOUT_S a prompt has no tokens, and is routed by load; that is counted, and the log says when an
engine begins to fail and when it tokenizes again, once in limits.LOG_INTERVAL_S at most. A prompt whose keys depend on
more than its tokens (images, a salt) has none either.

Concurrency: one trio thread.
"""

from __future__ import annotations

import logging
import re
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import trio
from xxhash import xxh3_128

from kvfs import limits
from scheduler.proxy.bodies import BadBody, Members, member, patched
from scheduler.proxy.upstream.connection import EngineFailed
from scheduler.proxy.upstream.engines import Engine, Engines

log = logging.getLogger("kvfs.proxy")

BYTES_A_TOKEN = 4
"""Of English text; an estimate where nobody counts."""
_ENTRY_BYTES = 256
_TOKEN_BYTES = 4
_SEED = secrets.randbits(64)
_NEXT_MESSAGE = re.compile(rb"\s*,\s*\{").match
"""What follows a brace where a message may end; also in the text of one, which costs a look-up."""
_MORE_THAN_TOKENS = re.compile(rb'"(?:image_url|image_embeds|input_audio|audio_url|video_url)"')
_SHAPES = (
    *("model", "tools", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens", "reasoning_effort", "mm_processor_kwargs"),
)
"""Members that change the tokens of the same messages."""
_JSON = b"Content-Type: application/json\r\n"
_OF_THE_CLIENT = frozenset((400, 401, 403, 413, 422))
"""Answers that say something of the prompt or of who asks, not of the engine."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as it is routed."""

    tokens: Sequence[int] | None
    """From its beginning on; None: nothing is known of them."""
    length: int
    """How many there are, estimated where they are not all known."""


class _Tokenized(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]


class _TextPart(msgspec.Struct, frozen=True):
    """What of a body is tokenized."""

    shape: bytes
    text: bytes
    """The messages, or the prompt, without what closes them."""
    is_chat: bool


class TokenCache:
    """Remember the tokens of texts."""

    def __init__(self, most_bytes: int = limits.TOKEN_CACHE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self.size_bytes = 0

    def get(self, part: _TextPart) -> tuple[array[int], int] | None:
        """Return the tokens of the longest known beginning, and how long that is; None where nothing is known."""
        longest = None
        for end, key in _keys(part):
            if key in self._entries:
                longest = end, key
        if longest is None:
            return None
        self._entries.move_to_end(longest[1])
        return self._entries[longest[1]], longest[0]

    def put(self, part: _TextPart, tokens: array[int]) -> None:
        """Remember the tokens of a text; nobody changes them."""
        *_, (_, key) = _keys(part)
        previous = self._entries.pop(key, None)
        self.size_bytes += _size(tokens) - (0 if previous is None else _size(previous))
        self._entries[key] = tokens
        while self.size_bytes > self._most_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.size_bytes -= _size(evicted)


def _size(tokens: array[int]) -> int:
    return _ENTRY_BYTES + _TOKEN_BYTES * len(tokens)


def _keys(part: _TextPart) -> Iterator[tuple[int, bytes]]:
    """Yield each length at which a text may be known, and its key; the last is the whole."""
    digest, start = xxh3_128(part.shape, seed=_SEED), 0
    view = memoryview(part.text)
    for end in _boundaries(part.text) if part.is_chat else ():
        digest.update(view[start:end])
        start = end
        yield start, digest.digest()
    digest.update(view[start:])
    yield len(view), digest.digest()


def _boundaries(text: bytes) -> Iterator[int]:
    end = text.find(b"}") + 1
    while end:
        if _NEXT_MESSAGE(text, end):
            yield end
        end = text.find(b"}", end) + 1


class Tokenizer:
    """Find the tokens of prompts."""

    def __init__(self, engines: Engines) -> None:
        self.cache = TokenCache()
        self.asked = 0
        """How often an engine was asked."""
        self.failed = 0
        """How often it had no tokens to give."""
        self._engines = engines
        self._nursery: trio.Nursery | None = None
        self._afterwards = 0

    async def run(self) -> None:
        """Run what is asked afterwards, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    async def prompt(self, members: Members, headers: bytes) -> Prompt:
        """Return the tokens of a body's prompt; of `headers` engines get the authorization. Raises BadBody."""
        name = "messages" if "messages" in members else "prompt"
        if name not in members:
            raise BadBody("there is neither prompt nor messages", "prompt")
        raw = bytes(members[name]).strip()
        if name == "prompt" and raw[:1] == b"[":
            return _given(members)
        length = len(raw) // BYTES_A_TOKEN + 1
        if len(raw) > limits.TOKENIZE_BYTES or "cache_salt" in members:
            return Prompt(None, length)
        part = _TextPart(_shape(members, name), raw[:-1], name == "messages")
        known = self.cache.get(part)
        if _MORE_THAN_TOKENS.search(part.text, 0 if known is None else known[1]):
            return Prompt(None, length)
        if known is not None:
            tokens, end = known
            rest = (len(part.text) - end) // BYTES_A_TOKEN
            if not rest:
                return Prompt(tokens, len(tokens))
            if rest < len(tokens):
                self._ask_afterwards(part, members, name, headers)
                # Blocks of the rest are unknown to everybody, so any tokens do for them.
                return Prompt(tokens + array("I", bytes(_TOKEN_BYTES * rest)), len(tokens) + rest)
        found = await self._ask(part, members, name, headers)
        return Prompt(found, len(found) if found else length)

    def _ask_afterwards(self, part: _TextPart, members: Members, name: str, headers: bytes) -> None:
        if self._nursery is not None and self._afterwards < limits.TOKENIZE_AFTERWARDS:
            self._afterwards += 1
            self._nursery.start_soon(self._run_afterwards, part, members, name, headers)

    async def _run_afterwards(self, part: _TextPart, members: Members, name: str, headers: bytes) -> None:
        try:
            await self._ask(part, members, name, headers)
        except Exception:
            log.exception("a prompt was not tokenized")
        finally:
            self._afterwards -= 1

    async def _ask(self, part: _TextPart, members: Members, name: str, headers: bytes) -> array[int] | None:
        """Have the least busy engine of the model tokenize, and remember its answer; None without one."""
        engine = self._engines.least_busy(model=member(members, "model", str) or "")
        if engine is None:
            return None
        self.asked += 1
        body = patched({each: members[each] for each in (*_SHAPES, name) if each in members}, {})
        fault = f"no answer in {limits.TOKENIZE_TIMEOUT_S:g} s"
        with trio.move_on_after(limits.TOKENIZE_TIMEOUT_S):
            found = await self._tokens(engine, _authorization(headers) + _JSON, body)
            if not isinstance(found, str):
                self.cache.put(part, found)
                _log_recovered(engine)
                return found
            fault = found
        self.failed += 1
        _log_fault(engine, fault)
        return None

    async def _tokens(self, engine: Engine, headers: bytes, body: bytes) -> array[int] | str:
        """Return the tokens of a prompt, or why there are none; empty where that is for the prompt's sake."""
        try:
            async with engine.ask("POST", b"/tokenize", headers, body) as answer:
                data = await answer.read_all()
            if answer.status == 200:
                return array("I", msgspec.json.decode(data, type=_Tokenized).tokens)
        except EngineFailed as error:
            if not error.alive:
                self._engines.suspect(engine, str(error))
            return str(error)
        except msgspec.DecodeError as error:
            return f"its answer is not as it should be: {error}"
        return "" if answer.status in _OF_THE_CLIENT else f"it answered {answer.status}"


def _log_fault(engine: Engine, fault: str) -> None:
    """Log that an engine does not tokenize, once until it does again."""
    now_s = trio.current_time()
    if fault and not engine.tokenize_fault and now_s - engine.tokenize_logged_s >= limits.LOG_INTERVAL_S:
        engine.tokenize_fault, engine.tokenize_logged_s = fault, now_s
        log.warning("engine %s does not tokenize, prompts are routed without tokens: %s", engine.name, fault)


def _log_recovered(engine: Engine) -> None:
    if engine.tokenize_fault:
        engine.tokenize_fault = ""
        log.warning("engine %s tokenizes again", engine.name)


def _given(members: Members) -> Prompt:
    """Return the tokens of a prompt that is given as such; of several prompts, an estimate."""
    try:
        tokens = msgspec.json.decode(members["prompt"], type=list[int])
    except msgspec.DecodeError:
        return Prompt(None, len(bytes(members["prompt"])) // BYTES_A_TOKEN + 1)
    return Prompt(tokens, len(tokens))


def _authorization(headers: bytes) -> bytes:
    """Return the lines of `headers` that an engine may want of every request."""
    return b"".join(line + b"\r\n" for line in headers.split(b"\r\n") if line.startswith(b"authorization:"))


def _shape(members: Members, name: str) -> bytes:
    parts = [name.encode()]
    parts += [b"%b=%b" % (each.encode(), members[each]) for each in _SHAPES if each in members]
    return b"\0".join(parts)

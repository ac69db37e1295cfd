"""How a prefill engine's KV cache reaches the decode engine, in the words of each engine's connector.

Responsibility: the members that each leg's body gets, as pure functions of the pair of engines and of what the prefill
engine answered.

- `store`: both engines are on one kvfs store, and the decode engine finds the blocks by their hashes. The prefill
  engine's connector is asked to name the last one, for which the decode engine then waits a moment. Where they are on
  the stores of two machines, the decode engine is told whose store has the blocks.
- `nixl`: vLLM's NixlConnector. The first leg asks for a remote decode, its answer says where the blocks are.
- `mooncake`: vLLM's MooncakeConnector. Both legs at once, joined by a transfer id; the decode engine is told the
  prefill engine's bootstrap server and id.
- `sglang`: both legs at once, with the whole body, joined by a bootstrap triple for each prompt. Its engines do nothing
  without: every request has both legs. A room serves one answer, and the decode engine alone answers. The room says
  which data-parallel rank prefills, too: an engine takes the remainder by their number (`follow_bootstrap_room`, the
  default of those that prefill), and fails a request that a header sends to another rank. So the room of a request that
  is for a rank has its remainder; any other is random, which spreads requests, and both engines derive the same rank.

Concurrency: pure functions, but for the random numbers that the caller passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvfs import limits
from kvfs.config.settings import HandOver
from kvfs.config.url_settings import host_and_port
from kvfs.http.server_place import host_in_url
from scheduler.proxy.bodies import BadBody, Members, count_prompts, member

MAX_ROOM = (1 << 63) - 1
BOOTSTRAP_PORT = 8998
"""The default of both bootstrap servers."""
AT_ONCE: frozenset[HandOver] = frozenset(("mooncake", "sglang"))
"""Hand-overs whose legs run at the same time."""
BOTH_LEGS: frozenset[HandOver] = frozenset(("sglang",))
"""Hand-overs whose engines, labelled for one side, do nothing alone."""

_NULL = msgspec.Raw(b"null")
_NO_LOGPROBS = (b"null", b"false", b"0")

Put = dict[str, Any]


class Bootstrap(NamedTuple):
    """The bootstrap server of a prefill engine."""

    host: str
    port: int
    engine_id: str = ""
    """As Mooncake's server says at /query; SGLang needs none."""


def bootstrap_at(setting: str, host: str) -> Bootstrap:
    """Return the bootstrap server at `HOST:PORT`, without HOST at the engine's own; where nothing is set, at the
    default port there."""
    own, port = host_and_port(setting) if setting else ("", BOOTSTRAP_PORT)
    return Bootstrap(own or host, port)


class Rank(NamedTuple):
    """The data-parallel rank that prefills."""

    number: int
    ranks: int
    """How many there are behind its address, as far as anybody knows."""


class _Answered(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_ANSWERED = msgspec.json.Decoder(_Answered)


def prefill(kind: HandOver) -> Put:
    """Return what a prefill leg asks that comes before the decode leg: to say what it stores, or where."""
    if kind == "store":
        return {"kv_transfer_params": {"do_remote_decode": True}}
    nobody = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **nobody}}


def after_prefill(answer: bytes, cached_tokens: int | None, peer: str = "") -> Put:
    """Return what a decode leg gets of the prefill leg's answer. `peer`: where its blocks are read, if not here.

    Where the answer says nothing but its usage, vLLM still reports the prefill engine's `cached_tokens` as the usage.
    """
    try:
        params = _ANSWERED.decode(answer).kv_transfer_params
    except msgspec.DecodeError:
        return {}
    if params:
        named = params.get("kvfs")
        if peer and isinstance(named, dict):
            params["kvfs"] = {**named, "source": peer}
        return {"kv_transfer_params": params}
    if cached_tokens is None:
        return {}
    return {"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": cached_tokens}}


def mooncake(bootstrap: Bootstrap, transfer_id: str) -> tuple[Put, Put]:
    """Return what the prefill and the decode leg get for vLLM's MooncakeConnector."""
    shared = {"transfer_id": transfer_id}
    prefill = {"do_remote_decode": True, "do_remote_prefill": False, **shared}
    decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": f"http://{host_in_url(bootstrap.host)}:{bootstrap.port}",
        "remote_engine_id": bootstrap.engine_id,
        **shared,
    }
    return {"kv_transfer_params": prefill}, {"kv_transfer_params": decode}


def sglang(bootstrap: Bootstrap, number: int, rank: Rank | None = None) -> Put:
    """Return the triple of one prompt. `number` is random; `rank`: None where the room alone is to choose one."""
    ranks = 1 if rank is None else rank.ranks
    room = number % (MAX_ROOM // ranks) * ranks + (0 if rank is None else rank.number)
    return {"bootstrap_host": bootstrap.host, "bootstrap_port": bootstrap.port, "bootstrap_room": room}


def sglang_rooms(
    bootstrap: Bootstrap, members: Members, draw: Callable[[], int], rank: Rank | None = None
) -> Put:
    """Return what both legs of a body get: of a list of prompts a triple for each. `draw` returns random numbers.

    Newer engines believe the rank that the body names, whatever the room says.
    """
    named = {} if rank is None else {"disagg_prefill_dp_rank": rank.number}
    prompts = count_prompts(members)
    if prompts is None:
        return sglang(bootstrap, draw(), rank) | named
    triples = [sglang(bootstrap, draw(), rank) for _ in range(prompts)]
    return {name: [triple[name] for triple in triples] for name in triples[0]} | named


def check_rooms(members: Members) -> None:
    """Check that SGLang's rooms can carry a request. Raises BadBody."""
    if (member(members, "n", int) or 1) > 1:
        raise BadBody("n: the engines are joined by a room for each prompt, which serves one answer", "n")
    if (count_prompts(members) or 1) > limits.MAX_PROXY_ROOMS:
        raise BadBody(f"prompt: the limit is {limits.MAX_PROXY_ROOMS} prompts, each with a room", "prompt")
    if member(members, "echo", bool) and bytes(members.get("logprobs", _NULL)).strip() not in _NO_LOGPROBS:
        raise BadBody("echo: log probabilities of the prompt stay with the engine that prefills", "echo")


def engine_id(answer: bytes, dp_rank: int = 0) -> str:
    """Return the engine's id in the answer of Mooncake's bootstrap server to /query; empty where there is none."""
    try:
        found = msgspec.json.decode(answer, type=dict[str, _Registered])
    except msgspec.DecodeError:
        return ""
    entry = found.get(str(dp_rank))
    return "" if entry is None else entry.engine_id


class _Registered(msgspec.Struct):
    engine_id: str = ""

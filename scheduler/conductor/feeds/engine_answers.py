"""What an engine's own answers say of it, as the instances that a Conductor registers: one for each of its ranks.

Responsibility: read `/v1/models`, `/kv_event_sources` and `/metrics` of vLLM, of which another engine may lack the last
two's contents: what nobody says is left out, and named in the notes.

Invariants:
- There are as many data-parallel ranks as its metrics have labels, else as publish events. Where their numbers do not
  begin at 0, its server knows them by others, and requests cannot be sent to one of them.
- An endpoint that nobody here can reach, and a stream that says nothing of where requests are sent to, is left out:
  load decides then, and nothing wrong is predicted.

Concurrency: pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvfs.errors import InvalidNamespace
from kvfs.http.server_place import host_in_url
from kvfs.limits import DEFAULT_BLOCK_TOKENS
from kvfs.namespaces import Namespace
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.values import CacheGroup, EngineType, Instance

_ROLES: Final[dict[str, Role]] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_EVERYWHERE: Final = ("*", "0.0.0.0", "::", "[::]")
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_NUMBER: Final = re.compile("[0-9]{1,9}")


class AnswerUnclear(Exception):
    """An engine's answers do not say what it is, or not yet."""


class Answers(NamedTuple):
    """Bodies of an engine's answers."""

    models: bytes
    sources: bytes | None
    """None: it does not know the question."""
    metrics: str


class Described(NamedTuple):
    """An engine's instances, and what is not known of them."""

    instances: tuple[Instance, ...]
    notes: tuple[str, ...]


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    """Of an adapter: the model that it is for."""
    owned_by: str = ""
    """The engine's own name, in lower case."""


class _Models(msgspec.Struct):
    data: list[_Model]


class _Source(msgspec.Struct):
    """A publisher of KV events."""

    topic: str = ""
    endpoint: str = ""
    replay_endpoint: str | None = None
    enable_kv_cache_events: bool = True


class _Publisher(NamedTuple):
    """Who publishes the events of one instance."""

    rank: int
    """The data-parallel rank in its events."""
    source: _Source | None
    instance_rank: int | None
    """The rank that requests are sent to; None: the instance is all there is behind its address."""


_models = msgspec.json.Decoder(_Models).decode
_groups = msgspec.json.Decoder(tuple[CacheGroup, ...]).decode
_sources = msgspec.json.Decoder(dict[int, _Source]).decode


def describe(url: str, role: Role | None, answers: Answers) -> Described:
    """Return the instances at `url`. `role`: their own, whatever it says; None: what it says.

    Raises AnswerUnclear, which says why.
    """
    notes: list[str] = []
    model = _model_of(answers.models, notes)
    engine_type: EngineType = "SGLang" if model.owned_by == "sglang" else "vLLM"
    sources = _sources_of(answers.sources)
    found = [
        Instance(
            url=url,
            model=model.id,
            engine_type=engine_type,
            **_fields(url, role, model.id, answers.metrics, publisher, notes),
        )
        for publisher in _publishers(sources, answers.metrics, notes)
    ]
    return Described(tuple(found), tuple(dict.fromkeys(notes)))


def _fields(
    url: str, role: Role | None, model: str, metrics: str, publisher: _Publisher, notes: list[str]
) -> dict[str, Any]:
    """Return the fields of one instance."""
    parts, rank = urlsplit(url), publisher.instance_rank
    name, host = parts.netloc if rank is None else f"{parts.netloc}@{rank}", host_in_url(parts.hostname or "")
    info = _labels(metrics, "vllm:kvfs_info", rank)
    if info is None and "# TYPE vllm:kvfs_info " in metrics:
        raise AnswerUnclear("its connector has not said yet what its blocks are known by")
    return {
        "name": name,
        "data_parallel_rank": rank,
        "role": role or _ROLES.get((info or {}).get("role", ""), "both"),
        **_blocks(model, info, _labels(metrics, "vllm:cache_config_info", rank) or {}, notes),
        **_engine_events(publisher, name, host, notes),
        **_store_events(info or {}, host, notes),
        **_store_peer(info or {}, notes),
    }


def _model_of(data: bytes, notes: list[str]) -> _Model:
    try:
        found = [each for each in _models(data).data if each.parent is None]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AnswerUnclear(f"/v1/models: {error}") from None
    if not found:
        raise AnswerUnclear("/v1/models names no model")
    if found[1:]:
        notes.append(f"of its model's names only {found[0].id!r} is routed, not {found[1].id!r}")
    return found[0]


# --- what its blocks are known by ----------------------------------------------------------------------------
def _blocks(
    model: str, info: dict[str, str] | None, cache: dict[str, str], notes: list[str]
) -> dict[str, Any]:
    """Return the namespace and the weights that kvfs's connector says, else a namespace with the size of blocks."""
    if info is not None:
        try:
            namespace = Namespace.from_json(info.get("namespace", ""))
        except InvalidNamespace as error:
            raise AnswerUnclear(f"/metrics: {error}") from None
        return {
            "namespace": namespace.as_mapping(),
            "groups": _groups_in(info.get("groups", ""), notes),
            "weights": info.get("weights", ""),
        }
    notes.append("no connector of kvfs is in it, so nothing is known of what a store below it has")
    size = cache.get("block_size", "")
    if not size.isdecimal():
        notes.append(f"the size of its blocks is not known: {DEFAULT_BLOCK_TOKENS} tokens are taken for it")
    tokens = int(size[:9]) if size.isdecimal() else DEFAULT_BLOCK_TOKENS
    try:
        alone = Namespace.of_one_device(
            model=model, revision="any", dtype="bfloat16", layout="LKTHD", block_tokens=tokens
        )
    except InvalidNamespace as error:
        raise AnswerUnclear(str(error)) from None
    return {"namespace": alone.as_mapping()}


def _groups_in(text: str, notes: list[str]) -> tuple[CacheGroup, ...]:
    """Return the cache groups that kvfs's connector says; none where it says nothing of them, or not so as is known
    here."""
    try:
        return _groups(text) if text else ()
    except (msgspec.MsgspecError, RecursionError) as error:
        notes.append(f"which caches its layers have is not understood, only what events say of them: {error}")
        return ()


def _labels(metrics: str, name: str, rank: int | None) -> dict[str, str] | None:
    """Return the labels of a metric's sample that is 1, of a rank if it has one; None without such a sample."""
    for labels, value in _samples(metrics, name):
        if value.split()[:1] in (["1.0"], ["1"]) and rank in (None, _rank_in(labels)):
            return labels
    return None


def _samples(metrics: str, name: str) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the labels of each sample of a metric, and what follows them."""
    for line in _lines(metrics, name + "{"):
        labels, _, value = line.rpartition("} ")
        yield {key: _ESCAPED.sub(_unescape, text) for key, text in _LABEL.findall(labels)}, value


def _rank_in(labels: dict[str, str]) -> int | None:
    """Return the data-parallel rank that a sample is of; None where it does not say."""
    number = labels.get("engine", "")
    return int(number) if _NUMBER.fullmatch(number) else None


def _lines(text: str, start: str) -> Iterator[str]:
    """Yield the lines with this start. A label's value may have what `str.splitlines` takes for an end."""
    return (line for line in text.split("\n") if line.startswith(start))


def _unescape(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


# --- its ranks, and where their events come from ---------------------------------------------------------------
def _sources_of(data: bytes | None) -> dict[int, _Source]:
    """Return who publishes events, by data-parallel rank."""
    try:
        found = {} if data is None else _sources(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AnswerUnclear(f"/kv_event_sources: {error}") from None
    return {rank: each for rank, each in found.items() if each.enable_kv_cache_events and each.endpoint}


def _publishers(sources: dict[int, _Source], metrics: str, notes: list[str]) -> list[_Publisher]:
    """Return what publishes the events of each instance."""
    samples = _samples(metrics, "vllm:num_requests_running")
    labelled = {rank for labels, _ in samples if (rank := _rank_in(labels)) is not None}
    ranks = sorted(labelled if len(labelled) > 1 else sources)
    if len(ranks) > 1 and ranks == list(range(len(ranks))):
        return [_Publisher(rank, sources.get(rank), rank) for rank in ranks]
    if len(ranks) > 1:
        notes.append(
            f"{len(ranks)} data-parallel ranks from {ranks[0]} on are behind its address, and requests cannot be sent "
            "to one of them: nothing is known of their own caches"
        )
        return [_Publisher(0, None, None)]
    [(rank, source)] = sources.items() or [(0, None)]
    return [_Publisher(rank, source, None)]


def _engine_events(publisher: _Publisher, name: str, host: str, notes: list[str]) -> dict[str, Any]:
    """Return the fields of the engine's own events."""
    rank, source, _ = publisher
    if source is None:
        notes.append("it publishes no KV events, so nothing is known of its own cache")
        return {}
    replay = _reached(source.replay_endpoint or "", host)
    if not replay:
        notes.append("it replays no KV events: those from before now and those that are lost stay unknown")
    if _is_bound(source.endpoint):
        endpoint = _reached(source.endpoint, host)
        if not endpoint:
            notes.append(f"its KV events are at {source.endpoint}, which cannot be reached from here")
            return {}
        return {"engine_topic": name, "engine_endpoint": endpoint, "engine_replay": replay}
    if not source.topic:
        notes.append("its KV events have no topic, so nobody can tell whose they are: --kv-events-config")
        return {}
    # Whoever asks for replays adds the rank, which the answer has added, too.
    return {
        "engine_topic": source.topic,
        "engine_rank": rank,
        "engine_replay": _shifted(replay, -rank),
    }


def _store_events(info: dict[str, str], host: str, notes: list[str]) -> dict[str, Any]:
    """Return the fields of the events of the service that the engine's connector is on."""
    endpoint, topic = info.get("store_endpoint", ""), info.get("store_topic", "")
    if not info or not (endpoint and topic):
        if info:
            notes.append(
                "its store publishes no KV events, so nothing is known of what it holds: [events] publish"
            )
        return {}
    if _is_bound(endpoint):
        notes.append(
            "its store's KV events do not come here: [events] publish is to be this Conductor's endpoint"
        )
        return {}
    replay = _reached(info.get("store_replay", ""), host)
    if not replay:
        notes.append("its store replays no KV events: what it held before now stays unknown: [events] replay")
    return {"store_topic": topic, "store_replay": replay}


def _store_peer(info: dict[str, str], notes: list[str]) -> dict[str, str]:
    """Return where other machines read the blocks of that service, by the name that they know it by."""
    peer = info.get("store_peer", "")
    if peer and _host(peer) in ("", *_EVERYWHERE):
        notes.append(
            f"its store is read by other machines at {peer}, which is the name of none: [cluster] address"
        )
        return {}
    return {"store_peer": peer}


def _is_bound(endpoint: str) -> bool:
    """Return whether a publisher of this endpoint binds it, as vLLM and kvfs read it."""
    return "*" in endpoint or "::" in endpoint or _host(endpoint) in _EVERYWHERE or "tcp://" not in endpoint


def _reached(endpoint: str, host: str) -> str:
    """Return where an endpoint that is bound at `host` is reached from here; empty where it is not."""
    if not endpoint.startswith("tcp://") or not endpoint.rpartition(":")[2].isdecimal():
        return ""
    bound = _host(endpoint)
    if bound in _EVERYWHERE:
        return f"tcp://{host}:{endpoint.rpartition(':')[2]}"
    return "" if _is_loopback(bound) and not _is_loopback(host) else endpoint


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "[::1]"


def _shifted(endpoint: str, by: int) -> str:
    start, _, port = endpoint.rpartition(":")
    return f"{start}:{int(port) + by}" if endpoint and by else endpoint

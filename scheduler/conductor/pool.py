"""A pool: the instances of one model, which share a namespace, as their planner sees them.

Responsibility: a slot for each instance; what of the index counts as in place at which slot; prompts from tokens or
hashes.

Invariants:
- All instances of a pool have one namespace and one identity of weights; in a mixed pool blocks of one would count for
  another, so it is refused.
- A slot's number does not change while its instance is there. Source n of the planner is what is in place at slot n;
  those from MAX_CONDUCTOR_INSTANCES on are of stores that send to other nodes, each with its number while it is there.
- Blocks of a distrusted instance's own streams are nobody's.

Concurrency: one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import or_
from typing import Any

from kvfs._native.cluster.index import ClusterIndex
from kvfs.errors import InvalidRequest, LimitExceeded
from kvfs.events.kv_events import CPU, GPU, STORAGE
from kvfs.keys import HASH_BYTES, prefix_hashes
from kvfs.limits import (
    MAX_BLOCK_SOURCES,
    MAX_CONDUCTOR_INSTANCES,
    MAX_EXCLUDED,
    MAX_ROUTE_HASHES,
    MAX_ROUTE_TOKENS,
)
from kvfs.namespace_groups import group_in
from kvfs.namespaces import Namespace
from scheduler.conductor.planning.native_planner import NativePlanner
from scheduler.conductor.planning.planner import Planner, Role
from scheduler.conductor.planning.python_planner import PythonPlanner
from scheduler.conductor.sources import Knowledge, ModelLayers, Stream
from scheduler.conductor.trust import Trust
from scheduler.conductor.values import EngineMetrics, Instance, RouteRequest
from scheduler.routing.admission import Mode, Slo
from scheduler.routing.cost import CostModel
from scheduler.routing.cost_fit import CostFitter
from scheduler.routing.queues import Discipline
from scheduler.routing.roles import Rules

NOT_SENT_BYTES_S = 1.0
"""The rate of a source that sends nothing to other instances: no load from it ever pays."""

EXPECTED = "expected"
"""The medium of blocks that prefills under way are to make."""
_PREFERRED = (GPU, CPU, STORAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a Conductor decides."""

    costs: CostModel
    policy: str = "default"
    discipline: Discipline = Discipline.FCFS
    admission: Mode = Mode.DEFAULT
    slo: Slo = field(default_factory=Slo)
    transfers: bool = False
    """Whether instances load blocks from the stores of others."""
    fitted: bool = True
    """Whether costs follow what was observed."""
    copies: bool = False
    """Whether nodes are to fetch hot prefixes from each other."""
    relabels: Rules | None = None
    """When instances labelled for one side change to the other; None: never."""


@dataclass(slots=True, eq=False)
class Member:
    """An instance in its slot."""

    instance: Instance
    slot: int
    expected: int
    """The source of what it is expected to have: blocks of prefills under way."""
    role: Role
    layers: ModelLayers
    """What it says of its layers."""
    trust: Trust = field(default_factory=Trust)
    streams: list[Stream] = field(default_factory=list)
    draining: bool = False
    relabels_to: Role | None = None
    """The role that it gets once it has no requests; until then it takes no more."""
    unreachable_until_s: float = float("-inf")
    """A client said that it failed a request."""
    down: str = ""
    """Why it is out; empty while it answers."""
    was_heard: bool = False
    """Whether bytes of its answers came to a proxy since it was looked at."""
    requests: int = 0
    """Reservations on it."""
    foreign: int = 0
    """Requests on it that were not routed here."""
    seen: EngineMetrics = field(default_factory=EngineMetrics)
    probed_s: float = float("-inf")
    """When it last said that."""

    def takes_work(self, now_s: float) -> bool:
        """Return whether the instance may be chosen now."""
        usable = self.instance.routable and not self.draining and self.relabels_to is None
        return usable and self.is_reachable(now_s)

    def is_reachable(self, now_s: float) -> bool:
        """Return whether it answers, and has failed no request lately."""
        return not self.down and now_s >= self.unreachable_until_s


class Pool:
    """See the module's header."""

    def __init__(self, first: Instance, options: Options, index: ClusterIndex) -> None:
        """Make a pool for the model of its first instance. Raises InvalidNamespace."""
        self.model, self.weights = first.model, first.weights
        self.namespace = Namespace.from_mapping(first.namespace)
        group = group_in(self.namespace)
        self.cache_model = b"" if group is None else group.model
        """What its blocks are of in stores, as `Place.model` has it."""
        self._keyed_group = None if group is None else group.number
        self._keyed_by = keyed_by(first)
        self.options = options
        self.members: dict[str, Member] = {}
        self.slots: list[Member | None] = []
        self.planner = _planner(options, index)
        self.fitter = CostFitter(options.costs)
        self.costs = options.costs
        self._streams: list[Stream] = []
        self._media: dict[int, tuple[tuple[str, ...], list[int]]] = {}
        self._shared: dict[str, int] = {}
        """The planner's sources of stores that send to other nodes."""
        self.kept: int | None = None
        """The slot whose batch is kept for a request that waits."""
        self.names: tuple[str, ...] = ()
        self.source_names: dict[int, str] = {}

    @property
    def has_full(self) -> bool:
        """Return whether the model has layers of full attention."""
        return self._keyed_group is None

    def layers_of(self, instance: Instance | None = None) -> ModelLayers:
        """Return what an instance says of the model's layers; without one what its namespace does."""
        groups = () if instance is None else instance.groups
        return ModelLayers(self.namespace.block_tokens, groups, self._keyed_group)

    # --- members ------------------------------------------------------------------------------------------
    def check(self, instance: Instance) -> None:
        """Check that an instance belongs here. Raises InvalidRequest naming the difference."""
        mine = keyed_by(instance)
        for name, value in self._keyed_by.items():
            if mine[name] != value:
                raise InvalidRequest(
                    f"instance {instance.name!r}: {name} is {mine[name]!r}, but in the pool of {self.model!r} "
                    f"{value!r}; instances that do not share blocks need models of their own"
                )

    def join(self, instance: Instance, expected: int, streams: list[Stream]) -> Member:
        """Put an instance into a free slot. REQUIRES `check`."""
        slot = next((n for n, held in enumerate(self.slots) if held is None), len(self.slots))
        if slot == len(self.slots):
            self.slots.append(None)
        member = Member(instance, slot, expected, instance.role, self.layers_of(instance), streams=streams)
        self.slots[slot] = self.members[instance.name] = member
        self.planner.join(slot)
        self.planner.take_work(slot, takes=instance.routable)
        self.planner.set_source(slot, self._rate_bytes_s)
        self.rebuild()
        return member

    def part(self, member: Member) -> None:
        """Empty an instance's slot. REQUIRES that no reservation is on it."""
        assert member.requests == 0
        del self.members[member.instance.name]
        self.slots[member.slot] = None
        self.planner.take_work(member.slot, takes=False)
        self.rebuild()

    def refresh(self, now_s: float) -> None:
        """Let the planner know who takes work."""
        for member in self.members.values():
            self.planner.take_work(member.slot, takes=member.takes_work(now_s))

    def keep_one(self, now_s: float) -> None:
        """Keep the batch of an instance for who waits longest: the same as long as it takes work, else the one that
        drains first."""
        usable = [each for each in self.members.values() if each.role != "prefill" and each.takes_work(now_s)]
        if all(each.slot != self.kept for each in usable):
            loads = [(self.planner.load(each.slot, now_s), each.slot) for each in usable]
            drained = min(
                ((load.active_tokens + load.committed_tokens, slot) for load, slot in loads), default=None
            )
            self.keep(None if drained is None else drained[1])

    def keep(self, slot: int | None) -> None:
        """Keep the batch of an instance for one request; None: keep none."""
        self.kept = slot
        self.planner.keep(slot)

    def fit(self) -> None:
        """Predict with what was observed from here on; of the network nothing is."""
        self.costs = replace(self.fitter.costs(), network_bytes_s=self.options.costs.network_bytes_s)
        self.planner.set_costs(self.costs)

    def slots_of(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the slots of instances; others are left out."""
        return tuple(member.slot for name in names if (member := self.members.get(name)) is not None)

    @property
    def knows_blocks(self) -> bool:
        """Return whether anything was heard of the caches of any instance."""
        nothing = (Knowledge.UNKNOWN, Knowledge.MUTE)
        for stream in self._streams:  # noqa: SIM110 (any() takes twice as long)
            if stream.knowledge not in nothing:
                return True
        return False

    # --- what is in place where ---------------------------------------------------------------------------
    @property
    def _rate_bytes_s(self) -> float:
        return self.options.costs.network_bytes_s if self.options.transfers else NOT_SENT_BYTES_S

    def rebuild(self) -> None:
        """Derive what counts as in place where, after instances, streams or judgements changed."""
        self._media.clear()
        places: dict[int, set[int]] = {}
        shared: set[str] = set()
        for member in self.members.values():
            here = set() if member.trust.distrusted else {member.slot}
            places[member.expected] = here
            for stream, medium, source in self._places_of(member):
                if medium == STORAGE and self.options.transfers:
                    name = f"{stream.name} {medium}"
                    shared.add(name)
                    # What stands in for full attention is in DRAM, too: at its own node nothing is sent.
                    own = set() if self.has_full else here
                    places[source] = places.get(source, set()) | own | {self._share(name)}
                else:
                    places[source] = places.get(source, set()) | here
            self.planner.set_role(member.slot, member.role)
        self._shared = {name: source for name, source in self._shared.items() if name in shared}
        self.planner.map_sources(places)
        self._streams = [stream for member in self.members.values() for stream in member.streams]
        self.names = tuple("" if member is None else member.instance.name for member in self.slots)
        self.source_names = dict(enumerate(self.names)) | {at: name for name, at in self._shared.items()}

    def _share(self, name: str) -> int:
        """Return the planner's source of a store that sends to other nodes."""
        if name not in self._shared:
            taken = set(self._shared.values())
            free = next(n for n in range(MAX_CONDUCTOR_INSTANCES, MAX_BLOCK_SOURCES) if n not in taken)
            self._shared[name] = free
            self.planner.set_source(free, self._rate_bytes_s)
        return self._shared[name]

    def mask_of(self, member: Member) -> int:
        """Return the index's mask of everything in place at an instance, trusted or not."""
        return self.media_of(member)[1][-1]

    def media_of(self, member: Member) -> tuple[tuple[str, ...], list[int]]:
        """Return an instance's media, the fastest first, and for each the index's mask of it and those before it."""
        found = self._media.get(member.slot)
        if found is None:
            masks = dict.fromkeys(_PREFERRED, 0) | self.masks_by_medium(member)
            masks[EXPECTED] = 1 << member.expected
            found = self._media[member.slot] = tuple(masks), list(accumulate(masks.values(), or_))
        return found

    def masks_by_medium(self, member: Member) -> dict[str, int]:
        """Return the index's mask of what streams say of each medium at an instance."""
        masks: dict[str, int] = {}
        for _, medium, source in self._places_of(member):
            masks[medium] = masks.get(medium, 0) | 1 << source
        return masks

    def _places_of(self, member: Member) -> Iterator[tuple[Stream, str, int]]:
        """Yield where blocks are that an instance may go on from. Of a store that is nowhere while its blocks count by
        other groups than the instance says: its own may be gone."""
        for stream in member.streams:
            known, said = stream.layers.get(self.cache_model), member.layers
            if known is None or not (stream.is_store and said.groups) or known.are_said_by(said):
                for medium, source in stream.media(self.cache_model):
                    yield stream, medium, source

    # --- prompts ------------------------------------------------------------------------------------------
    def question(self, request: RouteRequest) -> tuple[bytes, int]:
        """Return the hashes of a prompt's whole blocks, none where they are unknown, and its length in tokens.

        Raises InvalidRequest, LimitExceeded.
        """
        _check_asked(request)
        if request.tokens is not None:
            if request.hashes is not None or request.length is not None:
                raise InvalidRequest("a prompt is given by tokens, or by hashes and length, not by both")
            _check("tokens", len(request.tokens), MAX_ROUTE_TOKENS)
            if not request.tokens:
                raise InvalidRequest("tokens: a prompt has at least one")
            return self.hashes_of(request.tokens), len(request.tokens)
        if request.length is None or request.length < 1:
            raise InvalidRequest("length: a prompt without tokens has one of at least 1")
        _check("length", request.length, MAX_ROUTE_TOKENS)
        hashes = request.hashes or []
        _check("hashes", len(hashes), MAX_ROUTE_HASHES)
        if len(hashes) > request.length // self.namespace.block_tokens:
            raise InvalidRequest(
                f"hashes: {len(hashes)} blocks of {self.namespace.block_tokens} tokens are more than {request.length}"
            )
        return parse_hashes(hashes), request.length

    def hashes_of(self, tokens: Sequence[int]) -> bytes:
        """Return the prefix hashes of a prompt's whole blocks, as the connector keys them."""
        count = len(tokens) // self.namespace.block_tokens
        extra = [self.weights.encode() + b"\0", *[None] * (count - 1)] if self.weights and count else None
        return prefix_hashes(self.namespace, tokens, extra=extra)


def keyed_by(instance: Instance) -> dict[str, Any]:
    """Return what the keys of an instance's blocks depend on, by name. Raises InvalidNamespace."""
    return {**Namespace.from_mapping(instance.namespace).as_mapping(), "weights": instance.weights}


def _planner(options: Options, index: ClusterIndex) -> Planner:
    if options.policy == "default":
        return NativePlanner(index, options.costs, options.discipline)
    return PythonPlanner(index, options.costs, options.discipline, options.policy)


def parse_hashes(hashes: list[str]) -> bytes:
    """Return hashes of 32 hexadecimal digits as bytes. Raises InvalidRequest naming the first that is none."""
    try:
        joined = bytes.fromhex("".join(hashes))
    except ValueError:
        joined = b""
    if len(joined) == HASH_BYTES * len(hashes) and set(map(len, hashes)) <= {2 * HASH_BYTES}:
        return joined
    bad = next((text for text in hashes if len(text) != 2 * HASH_BYTES or not _is_hex(text)), "")
    raise InvalidRequest(f"hashes: {bad[:40]!r} is not {2 * HASH_BYTES} hexadecimal digits")


def _is_hex(text: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in text)


def _check_asked(request: RouteRequest) -> None:
    """Raises InvalidRequest naming the first number out of range, LimitExceeded."""
    _check("exclude", len(request.exclude), MAX_EXCLUDED)
    if not 0 <= request.waited_s < float("inf"):
        raise InvalidRequest(f"waited_s is {request.waited_s}: must be a number from 0 on")
    for name in ("ttft_slo_s", "tbt_slo_s"):
        limit_s = getattr(request, name)
        if limit_s is not None and not limit_s >= 0:
            raise InvalidRequest(f"{name} is {limit_s}: must be a number from 0 on")
    if request.output_tokens is not None and not 0 <= request.output_tokens <= MAX_ROUTE_TOKENS:
        raise LimitExceeded(f"output_tokens is {request.output_tokens}: must be from 0 to {MAX_ROUTE_TOKENS}")


def _check(name: str, count: int, most: int) -> None:
    if count > most:
        raise LimitExceeded(f"{name}: {count}, the limit is {most}")

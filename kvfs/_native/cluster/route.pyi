"""Decisions of the default policy: which instances a prompt goes to, and what was committed."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol

from typing_extensions import Buffer, disjoint_base

from kvfs._native.cluster.index import ClusterIndex

MAX_INSTANCES: Final = 1024
"""Of each kind."""

_Load = tuple[int, int, int, int, float]
"""Source, first block, how many, bytes, and how long it occupies the source."""
_Prefill = tuple[int, float, float, float, int, tuple[_Load, ...], tuple[int, ...], float, float, float]
"""The fields of `scheduler.routing.decisions.PrefillCandidate`, in their order, with numbers of requests for jobs."""
_Decode = tuple[int, float, float, int, float, bool]
"""The fields of `scheduler.routing.decisions.DecodeCandidate`, in their order."""
_Figures = tuple[int, float, float, float, int, int, float, float]
"""Of a candidate that was weighed: instance, queue, ready, prefill, reused and loaded blocks, delay, score."""

class _Costs(Protocol):
    """Has the coefficients of `scheduler.routing.cost.CostModel`."""

    @property
    def prefill_fixed_s(self) -> float: ...
    @property
    def prefill_token_s(self) -> float: ...
    @property
    def prefill_pair_s(self) -> float: ...
    @property
    def kv_token_bytes(self) -> int: ...
    @property
    def host_bytes_s(self) -> float: ...
    @property
    def step_fixed_s(self) -> float: ...
    @property
    def step_context_s(self) -> float: ...
    @property
    def step_request_s(self) -> float: ...
    @property
    def kv_capacity_tokens(self) -> int: ...

@disjoint_base
class Choice:
    """What a prompt was routed to; `Router.route` makes it."""

    @property
    def prefill_instance(self) -> int | None:
        """None where no instance takes work."""

    @property
    def decode_instance(self) -> int | None: ...
    @property
    def waited_s(self) -> float:
        """Between arrival and decision."""

    @property
    def ttft_s(self) -> float:
        """The predicted TTFT, from the arrival on; infinite without an instance."""

    @property
    def prefill(self) -> _Prefill | None: ...
    @property
    def decode(self) -> _Decode | None: ...
    @property
    def held_blocks(self) -> int:
        """Return how many blocks of the prompt, from the first on, some source holds or a prefill is to make."""

    @property
    def considered(self) -> tuple[_Figures, ...]:
        """Return what `choose` weighed, at that moment; `route` keeps nothing of it."""

    @property
    def considered_decode(self) -> tuple[_Decode, ...]: ...

@disjoint_base
class Router:
    """The state of a cluster, decisions of the default policy over it, and what was committed by them: `route` and
    `Ledger` of scheduler.routing, whose decisions these equal to the bit. The DRAM of prefill instance n is source n of
    the index.

    Raises InvalidRequest for what is out of range. One thread.
    """

    def __new__(cls, index: ClusterIndex, costs: _Costs, max_flights: int) -> Router: ...
    @property
    def index(self) -> ClusterIndex: ...

    # --- the cluster --------------------------------------------------------------------------------------
    def set_costs(self, costs: _Costs) -> None: ...
    def set_prefill(self, instance: int, *, length_aware: bool, draining: bool = False) -> None:
        """Add or change an instance that prefills. Its queue stays."""

    def set_decode(
        self, instance: int, *, active_requests: int, active_tokens: int, draining: bool = False
    ) -> None:
        """Add an instance that decodes, or note what it reports. What is committed to it stays."""

    def add_active(self, instance: int, requests: int, tokens: int) -> None:
        """Add to the batch of an instance that decodes; negative numbers take from it."""

    def set_role(self, instance: int, *, prefills: bool, decodes: bool) -> None:
        """Say what an instance is for that both prefills and decodes: both, until this is called."""

    def set_source(
        self, source: int, *, bytes_s: float, latency_s: float = 0.0, free_at_s: float | None = None
    ) -> None:
        """Add or change a source of blocks; without `free_at_s` the transfers committed to it stay."""

    def map_sources(self, sources: Mapping[int, Collection[int]]) -> None:
        """Say which sources here each source of the index counts as; those that are not named count for nobody. Until
        this is called they are the same. Several may count as one: the tiers of an instance, or what it is expected to
        have beside what it reports; and one as several: a store that instances share."""

    def source_free_at_s(self, source: int) -> float:
        """Return when the committed transfers from it are over."""

    def decode_load(self, instance: int) -> tuple[int, int, int, int]:
        """Return active requests and tokens, and those that are committed."""

    reserved_decode: int | None
    """A decode instance that takes only the request that it is reserved for."""
    answer_tokens: float
    """Mean length of the answers that were seen."""

    # --- decisions ----------------------------------------------------------------------------------------
    def route(
        self,
        hashes: Buffer,
        *,
        arrival_s: float,
        tokens: int,
        block_tokens: int,
        now_s: float,
        holds_reservation: bool = False,
    ) -> Choice:
        """Choose instances for a prompt of these blocks; nothing is changed."""

    def choose(
        self,
        hashes: Buffer,
        *,
        arrival_s: float,
        tokens: int,
        block_tokens: int,
        now_s: float,
        tbt_slo_s: float,
        leg_tokens: int,
        excluded: Sequence[int] = (),
        both_legs: bool = False,
        holds_reservation: bool = False,
    ) -> Choice:
        """Choose as `route` where prefill instance n and decode instance n are one: the instances that the roles allow.

        An instance does both where it may and the batch keeps `tbt_slo_s`. Else there are two legs, unless a decode
        instance would compute fewer than `leg_tokens` itself, or would be sooner. With `both_legs` none does that, and
        only instances for one side each are two legs. `excluded` are not looked at.
        """

    def explain(
        self,
        hashes: Buffer,
        *,
        arrival_s: float,
        tokens: int,
        block_tokens: int,
        now_s: float,
        holds_reservation: bool = False,
    ) -> tuple[tuple[_Prefill, ...], tuple[_Decode, ...]]:
        """Return all candidates that `route` weighs now, with their figures."""

    # --- commitments --------------------------------------------------------------------------------------
    def __len__(self) -> int:
        """Count the requests in flight."""

    def commit(self, number: int, choice: Choice, now_s: float, *, promised_s: float = ...) -> None:
        """Put a request into its queue, occupy the sources that it loads from, and count it on its decode instance.

        `promised_s`: the TTFT that it was admitted for, by default infinite.

        Raises Exists for a number in flight, InvalidRequest for a choice without an instance, and Busy where
        `max_flights` are in flight.
        """

    def start(self, instance: int, now_s: float) -> int | None:
        """Return the request that an idle instance starts to prefill now, if any may."""

    def start_idle(self, now_s: float) -> list[int]:
        """Start what every idle instance may start now, and return those requests."""

    def overdue(self, now_s: float, late_s: float) -> list[int]:
        """Return the requests whose prefill is late by its own length and `late_s`, where others wait behind it."""

    def prefilled(self, number: int) -> list[int]:
        """End a prefill that its instance has done, in its turn or out of it; return the requests that waited for its
        blocks. Raises NotFound, InvalidRequest for one that is prefilled already."""

    def joined(self, number: int) -> None:
        """End a flight whose request is in its batch: the instance reports it from here on. Raises NotFound."""

    def dropped(self, number: int) -> list[int]:
        """Drop a request that was refused or given up; return the requests that waited for its blocks. Raises
        NotFound."""

    def decode_of(self, number: int) -> int | None:
        """Return the decode instance that a request goes to. Raises NotFound."""

    def job(self, number: int) -> tuple[int, float, float, float, float, float, bool]:
        """Return instance, service, when its transfers are over, predicted end, rank, slack, and whether it started.
        Raises NotFound."""

    def prefill_load(self, instance: int, now_s: float) -> tuple[int, bool, float]:
        """Return how many requests wait there, whether one is prefilled, and the predicted time of all of them."""

    def queue(self, instance: int) -> tuple[int, ...]:
        """Return the requests that wait for their prefill, in order."""

"""Settings of a simulation: policy, cluster, costs and objectives.

Responsibility: the options and their bounds. Concurrency: none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfs.errors import InvalidRequest
from scheduler.routing.admission import Mode, Slo
from scheduler.routing.cost import CostModel, table_costs
from scheduler.routing.policies import POLICIES
from scheduler.routing.queues import Discipline
from scheduler.routing.roles import Rules


@dataclass(frozen=True, slots=True)
class LowerTier:
    """A tier below DRAM, of each node or one for all."""

    name: str
    blocks: int
    bytes_s: float
    latency_s: float = 0.0
    """Of one read."""
    depth: int = 32
    """Blocks that are read at once; their latencies pass together."""
    shared: bool = False
    """Whether it is one for all nodes, such as an S3 bucket."""

    def rate(self, block_bytes: int) -> float:
        """Return the rate that so many reads at once come to, in bytes a second."""
        return (
            min(self.bytes_s, self.depth * block_bytes / self.latency_s) if self.latency_s else self.bytes_s
        )

    def check(self) -> None:
        """Check the bounds. Raises InvalidRequest."""
        if not (self.bytes_s > 0 and self.latency_s >= 0 and self.depth >= 1 and self.blocks >= 0):
            raise InvalidRequest(
                f"tier {self.name!r}: rate and depth are above 0, latency and blocks not below"
            )


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance that fails and comes back with an empty DRAM."""

    instance: int
    at_s: float
    down_s: float
    decode: bool = False
    """Whether it is a decode instance; its requests continue elsewhere, from the tokens that are out."""


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a simulation. Times are in seconds, capacities per instance."""

    policy: str = "default"
    discipline: Discipline = Discipline.FCFS
    admission: Mode = Mode.NONE
    prefill: int = 8
    decode: int = 0
    speed: float = 1.0
    slo: Slo = field(default_factory=Slo)
    decode_factor: float = 1.0
    cache_blocks: int = 5859
    seed: int = 0
    costs: CostModel = field(default_factory=table_costs)
    """The cost table, before `decode_factor`."""
    fitted: bool = False
    """Whether policies predict with a cost model that starts as the table and learns; else they know the true one."""
    tiers: tuple[LowerTier, ...] = ()
    """What takes blocks that DRAM evicts, the highest first."""
    handover_bytes_s: float = float("inf")
    """The rate at which a prompt's KV cache is read by its decode instance once it is made; infinite where it streams
    while it is made."""
    handover_s: float = 0.0
    """What a hand-over takes beside that."""
    coupled: bool = False
    """Whether each of the `prefill` instances decodes as well what it has prefilled; `decode` is 0 then."""
    chunk_tokens: int = 0
    """How much of a prompt a coupled instance computes in one step, beside its batch; 0 for all of it."""
    failures: tuple[Failure, ...] = ()
    replicates: bool = False
    """Whether hot blocks are copied ahead of demand; else what is loaded is kept, if it earned that."""
    group: int = 1
    """The most instances that prefill one prompt in a pipeline."""
    relay: bool = False
    """Whether a prompt may begin on one instance and go on at another."""
    relabels: Rules | None = None
    """When instances change their roles: all of them have a cache in the pool and can do either, the first `prefill`
    ones prefill at first. None for instances of one role each, of which those that decode have no cache."""

    def check(self) -> None:
        """Check the bounds. Raises InvalidRequest."""
        if self.policy not in POLICIES:
            raise InvalidRequest(f"policy {self.policy!r}: there are {', '.join(POLICIES)}")
        for name, low, high in (
            ("prefill", 1, 1024),
            ("decode", 0, 1024),
            ("cache_blocks", 0, 1 << 32),
            ("group", 1, 1024),
        ):
            if not low <= getattr(self, name) <= high:
                raise InvalidRequest(f"{name} = {getattr(self, name)}: must be from {low} to {high}")
        for name in ("speed", "decode_factor"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidRequest(f"{name} = {getattr(self, name)}: must be above 0")
        if not (self.handover_bytes_s > 0 and self.handover_s >= 0 and self.chunk_tokens >= 0):
            raise InvalidRequest("the rate of hand-overs is above 0, their time and chunk_tokens not below")
        if self.coupled and (self.decode or self.failures):
            raise InvalidRequest("coupled instances: decode = 0, and no failures")
        if (self.group > 1 or self.relay) and (self.coupled or self.failures):
            raise InvalidRequest("prompts on several instances: not with coupled instances or failures")
        if self.relabels is not None:
            self.relabels.check()
            if not self.decode or self.failures:
                raise InvalidRequest("relabels: decode instances, and no failures")
        for tier in self.tiers:
            tier.check()
        for failure in self.failures:
            if not 0 <= failure.instance < (self.decode if failure.decode else self.prefill):
                raise InvalidRequest(f"failure of instance {failure.instance}: there is none")

"""The scheduler's half of the vLLM connector: plans the loads of each request and the stores of each step.

Responsibility: keep every request's prefix hashes, match them against the shared table, and put loads and stores of a
step into its metadata. It copies no bytes.

Invariants:
- Nothing here waits: matching reads shared memory, and during an outage nothing matches. (A user outside the service's
  group asks the service, for CONNECTOR_MATCH_S at most; then it is a miss.) Where a prefill engine is still storing a
  request's blocks, or the service fetches them from another machine, vLLM is told to ask again in its next step.
- Every key depends on the weights: the first block's hash has the samples of all ranks at the start or, after a
  reset, a name that no other engine has. A request that began before a reset is not stored after it: its first blocks
  are of the old weights. So it is with a request's adapter, whose name is in each of its hashes (adapters.py).
- A request whose load failed loads nothing more: it would ask for the same blocks for as long as they do not come, and
  so would every other one: what is below DRAM is a miss until it comes up again.
- A hit is a hit on every rank: each has its shard under its own namespace, so the shortest match counts.
- Only whole blocks are loaded and stored, never the one with the prompt's last token, which the engine has to
  compute. A block is stored once all its tokens are known and computed, so speculated tokens are not.
- What is counted here are blocks of `block_tokens`. A namespace may have smaller ones, whose number divides that: then
  a rank has several keys for each block (`kvfs.connectors.vllm_group_planner`).

Concurrency: the engine's scheduler thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvfs.client.blocks import Blocks
from kvfs.client.session import choose_keys
from kvfs.connectors.adapters import Adapter, Adapters
from kvfs.connectors.common import VLLM_LOG, Link, LowerTiers, new_epoch
from kvfs.connectors.remote.vllm_fetches import Fetch, PeerFetches
from kvfs.connectors.vllm_rules.handover import Handover, Wait, answer, is_asked_for, source_of
from kvfs.keys import HASH_BYTES, prefix_hashes
from kvfs.limits import CONNECTOR_MATCH_S, MAX_EXTRA_BYTES
from kvfs.namespaces import Namespace

log = logging.getLogger(VLLM_LOG)


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one request and cache group. `keys` has, for each rank, their prefix hashes."""

    request_id: str
    block_ids: list[int]
    keys: dict[Rank, bytes]
    parents: dict[Rank, bytes | None]
    """The hash before the first block."""
    adapter: Adapter | None = None
    anchors: dict[Rank, bytes] | None = None
    """The parents of the blocks, where these are not each the block before."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request in a step: its tokens computed before and after the step, and its blocks."""

    request_id: str
    tokens_before: int
    tokens_after: int
    block_ids: Sequence[int]
    """Of the first cache group."""
    by_group: Sequence[Sequence[int]] = ()
    """Of each group, for those who plan several."""
    states: Sequence[tuple[int, int, int]] = ()
    """Blocks that hold recurrent layers' state when the step ends: cache group, block, and tokens that are in it."""


Rank = tuple[int, ...]
"""Pipeline rank, tensor rank, and the index of the cache group, where there are several."""


@dataclass(slots=True)
class Plan:
    """The workers' loads and stores of one step."""

    loads: list[BlockRun] = field(default_factory=list)
    stores: list[BlockRun] = field(default_factory=list)
    computes: bool = False
    """Whether the step computes tokens of blocks that this or a later one may store."""
    epoch: int = 0
    """How often the engine's weights have changed; loads and stores are of this epoch."""
    adapters: dict[str, Adapter] = field(default_factory=dict)
    """Of the requests that compute with one: what their hashes take it for."""


@dataclass(slots=True)
class Tracked:
    """A request and the hashes of its whole blocks, for each rank."""

    request: Any
    keys: dict[Rank, bytearray]
    adapter: Adapter | None = None
    hashed: int = 0
    """Blocks that have their keys, on every rank."""
    mm_index: dict[int, int] = field(default_factory=dict)
    """Where the next block's search for multi-modal inputs begins, by the tokens of a block."""
    matched_from: int = 0
    """Blocks that the engine itself had when it asked."""
    stored: int = 0
    """Blocks that earlier steps have planned."""
    wait: Wait | None = None
    """For blocks that a prefill engine stores; None before the first match."""
    fetch: Fetch | None = None
    """Of blocks that another machine has; None where none began."""


class Planner:
    """Plan loads and stores."""

    def __init__(
        self,
        link: Link,
        block_tokens: int,
        *,
        store_generated: bool,
        is_async: bool,
        fetches_any: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._clock = clock
        self._block_tokens = block_tokens
        self._store_generated = store_generated
        self._is_async = is_async
        self._fetches_any = fetches_any
        """Whether other machines are asked for blocks of requests that name none."""
        self._namespaces: dict[Rank, Namespace] = {}
        self._adapters = Adapters()
        self._adapter_requests: dict[str, Any] = {}
        """vLLM's LoRARequests of the requests that have one, kept or not."""
        self._weights = ""
        """The identity of the weights, for the first block of every request."""
        self._epoch = 0
        self._is_right = True
        """Whether the workers' weights are those of the epoch."""
        self._has_old_blocks = False
        """Whether the engine's own cache may hold blocks of weights before the epoch's."""
        self._requests: dict[str, Tracked] = {}
        self._loads: list[BlockRun] = []
        self._loading: dict[str, list[BlockRun]] = {}
        """The last load of each request."""
        self._failed: set[str] = set()
        """Requests of which a load has failed."""
        self._lower = LowerTiers(clock)
        self._has_warned = False
        """Whether a hand-over from an engine that shares nothing with this one was logged."""
        self.counts = {
            "queries": 0,
            "hit_blocks": 0,
            "stored_blocks": 0,
            "epochs": 0,
            "handovers": 0,
            "late_handovers": 0,
        }
        self._fetches = PeerFetches(link, self.counts, log)

    def set_namespaces(self, namespaces: dict[Rank, Namespace], weights: str = "") -> None:
        """Set the namespaces of all workers, each from its own cache, and the identity of their weights."""
        self._namespaces, self._weights = namespaces, weights
        if namespaces:
            self._link.open(next(iter(namespaces.values())))

    # --- weights ------------------------------------------------------------------------------------------
    def reset(self, *, has_old_blocks: bool = False) -> None:
        """Begin an epoch with new weights. REQUIRES a call between two steps.

        `has_old_blocks`: the engine could not empty its own cache.
        """
        assert not self._loads, "in the middle of a step"
        self._epoch += 1
        self._weights, self._is_right, self._has_old_blocks = new_epoch(), True, has_old_blocks
        self._requests.clear()
        if not has_old_blocks:
            self._adapters.emptied()
        self.counts["epochs"] += 1

    def end_epoch(self, epoch: int) -> None:
        """Match and store nothing until the next epoch: a worker's weights have changed in this one."""
        if epoch == self._epoch:
            self._is_right = False

    def end_adapter(self, number: int, epoch: int, name: str) -> None:
        """End an adapter's epoch, in which a worker computed with `name`: its requests are stored no more."""
        if self._adapters.loaded(number, epoch, name):
            for request_id, request in self._adapter_requests.items():
                if int(request.lora_int_id) == number:
                    self._requests.pop(request_id, None)

    def emptied(self) -> None:
        """Note that the engine has emptied its own cache, with or without a reset of the connector."""
        self._adapters.emptied()

    # --- loads --------------------------------------------------------------------------------------------
    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded after those computed, and whether between steps.

        None asks vLLM to call again: blocks of this request are still being stored, or fetched.
        """
        adapter, is_mixed = self._adapter_of(request)
        has_others = num_computed_tokens > 0 and (self._has_old_blocks or is_mixed)
        if not self._namespaces or not self._is_right or has_others:
            self._requests.pop(request.request_id, None)
            return 0, False
        tracked = self._track(request, adapter)
        now_s = self._clock() if self._link.is_up else math.inf  # during an outage nothing is on its way
        if tracked.fetch is not None and self._fetches.goes_on(tracked.fetch, now_s):
            return None, False
        first = tracked.matched_from = num_computed_tokens // self._block_tokens
        last = (request.num_tokens - 1) // self._block_tokens
        self._extend(tracked, last)
        last = min(last, tracked.hashed)
        hits = self._hits(tracked, first, last)
        wait = tracked.wait = tracked.wait or Wait(self._handed_over(tracked), now_s)
        if self._fetches_rest(tracked, wait, first + hits, last, now_s):
            return None, False
        if self._awaits(wait, first + hits, now_s):
            return None, False
        self.counts["queries"] += 1
        return hits * self._block_tokens, self._is_async and hits > 0

    def _adapter_of(self, request: Any) -> tuple[Adapter | None, bool]:
        """Return a request's adapter, and whether the engine's own cache may mix it with what it was."""
        lora = request.lora_request
        if lora is None:
            return None, False
        self._adapter_requests[request.request_id] = lora
        return self._adapters.of(lora), self._adapters.is_mixed(lora)

    def _hits(self, tracked: Tracked, first: int, last: int) -> int:
        blocks = self._link.blocks(next(iter(self._namespaces.values())))
        hits = max(last - first, 0)
        if tracked.request.request_id in self._failed:
            return 0
        for keys in tracked.keys.values():
            if not hits or blocks is None:
                return 0
            some = bytes(keys[first * HASH_BYTES : (first + hits) * HASH_BYTES])
            hits = self._link.attempt(partial(self._readable, blocks, some), 0)
        return hits

    def _readable(self, blocks: Blocks, keys: bytes) -> int:
        there = blocks.match(keys, timeout_s=CONNECTOR_MATCH_S)
        return self._lower.readable(blocks, keys[: there * HASH_BYTES])

    def _fetches_rest(self, tracked: Tracked, wait: Wait, there: int, last: int, now_s: float) -> bool:
        """Return whether blocks after the first `there` are being fetched, from the machine that the request names.

        Once for each request; once more where its prefill engine was still storing blocks that it has named.
        """
        fetch, source = tracked.fetch, source_of(tracked.request.kv_transfer_params)
        if fetch is not None:
            self._fetches.settle(fetch, there)
        is_due = fetch is None or (wait.is_late(there, now_s) and fetch.may_go_again(now_s))
        is_left_alone = now_s == math.inf or tracked.request.request_id in self._failed
        if not (source or self._fetches_any) or there >= last or not is_due or is_left_alone:
            return False
        wanted = {self._namespaces[rank]: keys for rank, keys in self._needed(tracked, there, last)}
        begun = self._fetches.begin(fetch, source, wanted, there, now_s)
        tracked.fetch = begun
        return begun is not None and self._fetches.goes_on(begun, now_s)

    def _needed(self, tracked: Tracked, there: int, last: int) -> Iterator[tuple[Rank, bytes]]:
        """Return the keys that a hit of `last` blocks needs of each rank, besides a hit of `there`."""
        for rank, keys in tracked.keys.items():
            yield rank, bytes(keys[there * HASH_BYTES : last * HASH_BYTES])

    def _awaits(self, wait: Wait, there: int, now_s: float) -> bool:
        """Return whether a prefill engine is still storing more than the first `there` blocks of a request."""
        named = wait.blocks
        goes_on = wait.goes_on(there, now_s)
        self.counts["late_handovers"] += not goes_on and there < named
        return goes_on

    def _handed_over(self, tracked: Tracked) -> int:
        """Return how many blocks the request says that a prefill engine has stored, or stores now."""
        handover = Handover.read(tracked.request.kv_transfer_params)
        if handover is None:
            return 0
        self.counts["handovers"] += 1
        rank, namespace = next(iter(self._namespaces.items()))
        at = tracked.keys[rank].rfind(handover.last_block)
        if at >= 0 and at % HASH_BYTES == 0:
            return (at // HASH_BYTES + 1) // self._keys_of_block(rank)
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a prefill engine hands over blocks that are not this engine's: its namespace is %r, this one's %s; "
                "where they are equal, its tokens, adapter or weights in memory differ (logged once)",
                handover.namespace,
                namespace.digest.hex(),
            )
        return 0

    def allocated(self, request: Any, by_group: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """Plan a load into the blocks that the engine has allocated for it, of each cache group."""
        if num_external_tokens <= 0:
            return
        tracked = self._requests[request.request_id]
        first, count = tracked.matched_from, num_external_tokens // self._block_tokens
        loads = list(self._loads_of(tracked, first, first + count, by_group))
        self._loads += loads
        self._loading[request.request_id] = loads
        self.counts["hit_blocks"] += count

    def _loads_of(
        self, tracked: Tracked, first: int, last: int, by_group: Sequence[Sequence[int]]
    ) -> Iterator[BlockRun]:
        """Return what a request needs to go on behind its first `last` blocks, of which it has the first `first`."""
        yield self._run(tracked, tracked.keys, first, last, by_group[0])

    def failed(self, block_ids: Set[int]) -> None:
        """Note blocks of the engine's cache that were not loaded: their requests compute them, and ask no more."""
        for request_id, [run] in list(self._loading.items()):
            which = [i for i, block in enumerate(run.block_ids) if block in block_ids]
            if which:
                self._failed_load(request_id, which)

    def failed_requests(self, request_ids: Iterable[str]) -> None:
        """Note requests of which a load failed: the engine begins them anew, and they ask no more."""
        for request_id in request_ids:
            self._failed_load(request_id, None)

    def _failed_load(self, request_id: str, which: Sequence[int] | None) -> None:
        """Note that blocks of a load were not loaded; None: perhaps none of them was."""
        self._failed.add(request_id)
        blocks = self._link.blocks(next(iter(self._namespaces.values())))
        for run in self._loading.pop(request_id, []):
            for keys in run.keys.values():
                missed = keys
                if which is not None:
                    missed = choose_keys(keys, which)
                if blocks is not None:
                    self._link.attempt(partial(self._lower.failed, blocks, missed), None)

    # --- stores -------------------------------------------------------------------------------------------
    def plan(self, steps: Iterable[Step]) -> Plan:
        """Return the plan of a step, with the loads since the last one."""
        plan = Plan(loads=self._loads, epoch=self._epoch)
        self._loads = []
        is_storing = self._link.is_up and self._is_right
        for step in steps:
            tracked = self._requests.get(step.request_id)
            lora = self._adapter_requests.get(step.request_id)
            if lora is not None:
                adapter = None if tracked is None else tracked.adapter
                plan.adapters[step.request_id] = adapter or self._adapters.of(lora)
            if tracked is not None and is_storing:
                plan.computes = True
                self._plan_stores(plan, tracked, step)
        return plan

    def _plan_stores(self, plan: Plan, tracked: Tracked, step: Step) -> None:
        request = tracked.request
        known = request.num_tokens if self._store_generated else request.num_prompt_tokens
        # Blocks computed a second time (after a preemption, or a failed load) may have left the store.
        first = min(tracked.stored, step.tokens_before // self._block_tokens)
        whole = min(step.tokens_after, known) // self._block_tokens
        last = min(whole, self._blocks_of(step))
        tracked.stored = max(last, first)
        if last <= first:
            return
        self._extend(tracked, last)
        for run in self._stores_of(tracked, step, first, min(last, tracked.hashed)):
            plan.stores.append(run)
            self.counts["stored_blocks"] += len(run.block_ids)

    def _blocks_of(self, step: Step) -> int:
        """Return for how many blocks of a request the engine has memory."""
        return len(step.block_ids)

    def _stores_of(self, tracked: Tracked, step: Step, first: int, last: int) -> Iterator[BlockRun]:
        """Return what is to be stored of these blocks."""
        for start, stop in runs_of(self._missing(tracked.keys, first, last)):
            yield self._run(tracked, tracked.keys, start, stop, step.block_ids)

    def _missing(self, of_ranks: Mapping[Rank, bytearray], first: int, last: int) -> list[int]:
        """Return blocks that some rank does not have in the store."""
        blocks = self._link.blocks(next(iter(self._namespaces.values())))
        if blocks is None:
            return []
        missing: set[int] = set()
        for keys in of_ranks.values():
            some = bytes(keys[first * HASH_BYTES : last * HASH_BYTES])
            nothing: list[bool] = []
            there = self._link.attempt(partial(blocks.exists, some, timeout_s=CONNECTOR_MATCH_S), nothing)
            missing.update(first + i for i, is_there in enumerate(there) if not is_there)
        return sorted(missing)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Stop tracking a request; return what its answer says to a decode engine, if that was asked for."""
        tracked = self._requests.pop(request.request_id, None)
        self._adapter_requests.pop(request.request_id, None)
        self._loading.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        if tracked is not None and tracked.fetch is not None:
            tracked.fetch.end()
        if not is_asked_for(request.kv_transfer_params):
            return None
        last = (request.num_prompt_tokens - 1) // self._block_tokens
        if tracked is None or not last or min(tracked.stored, tracked.hashed) < last:
            return answer(None)
        rank, namespace = next(iter(self._namespaces.items()))
        end = last * self._keys_of_block(rank) * HASH_BYTES
        last_block = bytes(tracked.keys[rank][end - HASH_BYTES : end])
        return answer(Handover(last_block, namespace.digest.hex()))

    # --- hashes -------------------------------------------------------------------------------------------
    def _track(self, request: Any, adapter: Adapter | None) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request or tracked.adapter != adapter:
            tracked = Tracked(request, {rank: bytearray() for rank in self._namespaces}, adapter)
            self._requests[request.request_id] = tracked
        return tracked

    def _extend(self, tracked: Tracked, blocks: int) -> None:
        """Hash blocks up to this one; no further for a request whose inputs cannot be put into a key."""
        first = tracked.hashed
        if blocks <= first:
            return
        tokens = np.array(
            tracked.request.all_token_ids[first * self._block_tokens : blocks * self._block_tokens],
            dtype=np.int64,
        )
        if tokens.size < (blocks - first) * self._block_tokens or (tokens < 0).any():
            return
        extras = {}
        for size in {namespace.block_tokens for namespace in self._namespaces.values()}:
            keys_of_block = self._block_tokens // size
            extra = self._extra(tracked, first * keys_of_block, blocks * keys_of_block, size)
            if extra is None:
                return
            if first == 0 and self._weights:
                extra[0] = self._weights.encode() + b"\0" + (extra[0] or b"")
            extras[size] = extra
        for rank, keys in tracked.keys.items():
            namespace, parent = self._namespaces[rank], bytes(keys[-HASH_BYTES:]) if keys else None
            keys += prefix_hashes(namespace, tokens, parent=parent, extra=extras[namespace.block_tokens])
        tracked.hashed = blocks

    def _keys_of_block(self, rank: Rank) -> int:
        """Return how many keys a rank has for each block."""
        return self._block_tokens // self._namespaces[rank].block_tokens

    def _extra(self, tracked: Tracked, first: int, last: int, size: int) -> list[bytes | None] | None:
        """Return what decides each block of `size` tokens besides tokens and weights; None for an unknown adapter.

        That is adapter, images, salt and embeddings, from vLLM's own hashes; of an adapter these have name and path.
        """
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        request, adapter = _WithoutAdapter(tracked.request), tracked.adapter
        if adapter is not None and not adapter.name:
            return None
        name = () if adapter is None else (adapter.name,)
        found: list[bytes | None] = []
        mm_index = tracked.mm_index.get(size, 0)
        for block in range(first, last):
            keys, mm_index = generate_block_hash_extra_keys(
                request, block * size, (block + 1) * size, mm_index
            )
            text = repr((name, keys)).encode() if keys or name else None
            assert text is None or len(text) <= MAX_EXTRA_BYTES
            found.append(text)
        tracked.mm_index[size] = mm_index
        return found

    def _run(
        self,
        tracked: Tracked,
        of_ranks: Mapping[Rank, bytearray],
        first: int,
        last: int,
        block_ids: Sequence[int],
    ) -> BlockRun:
        keys, parents = {}, {}
        for rank, all_keys in of_ranks.items():
            keys[rank] = bytes(all_keys[first * HASH_BYTES : last * HASH_BYTES])
            parents[rank] = bytes(all_keys[(first - 1) * HASH_BYTES : first * HASH_BYTES]) if first else None
        request_id = tracked.request.request_id
        return BlockRun(request_id, list(block_ids[first:last]), keys, parents, tracked.adapter)


class _WithoutAdapter:
    """A request without its adapter, which has another name here than in vLLM."""

    lora_request = None

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive numbers as (first, one past the last)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs

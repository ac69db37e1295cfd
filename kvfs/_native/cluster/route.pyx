"""Decisions of the default policy, seen from Python: a thin seam over `route_core.c` and `legs_core.c`.

Invariants: numbers of instances and sources are in range, and sizes such that no product of integers overflows; both are
checked here.
Concurrency: one thread, with the GIL; the index has its own mutex.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EEXIST, ENOENT, ENOSPC
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from kvfs._native.cluster.index cimport KVFS_CLUSTER_HASH_BYTES, KVFS_CLUSTER_SOURCES, ClusterIndex, kvfs_runs

from kvfs.errors import Busy, Exists, InvalidRequest, NotFound

cdef extern from "cluster/queues_core.h" nogil:
    enum:
        KVFS_NO_JOB
    struct kvfs_job_ref:
        uint32_t job
        uint32_t serial
    struct kvfs_job:
        int64_t number
        double service_s
        double loaded_s
        double finish_s
        double rank
        double slack_s
        kvfs_job_ref *followers
        uint32_t follower_count
        uint32_t instance
        int32_t decode
        bint is_started
        bint is_done
        bint is_in_flight
    struct kvfs_jobs:
        kvfs_job *at
        uint32_t in_flight
    struct kvfs_prefill:
        uint32_t *jobs
        uint32_t count
        uint32_t running
        uint8_t is_length_aware
        uint8_t is_draining
        uint8_t is_there
    uint32_t kvfs_job_find(const kvfs_jobs *jobs, int64_t number)
    void kvfs_job_release(kvfs_jobs *jobs, uint32_t job)

cdef extern from "cluster/route_core.h" nogil:
    enum:
        KVFS_INSTANCES
        KVFS_NOBODY
        KVFS_PREFILLS
        KVFS_DECODES
    struct kvfs_costs:
        double prefill_fixed_s
        double prefill_token_s
        double prefill_pair_s
        double host_bytes_s
        double step_fixed_s
        double step_context_s
        double step_request_s
        int64_t kv_token_bytes
        int64_t kv_capacity_tokens
    struct kvfs_source:
        double bytes_s
        double latency_s
        double free_at_s
        uint8_t is_there
    struct kvfs_decode:
        int64_t active_requests
        int64_t active_tokens
        int64_t committed_requests
        int64_t committed_tokens
        uint8_t is_draining
        uint8_t is_there
    struct kvfs_prompt:
        double arrival_s
        double now_s
        int64_t tokens
        int64_t block_tokens
        bint holds_reservation
    struct kvfs_load:
        uint32_t source
        int64_t first_block
        int64_t blocks
        int64_t size_bytes
        double busy_s
    struct kvfs_prefill_candidate:
        uint32_t instance
        double queue_s
        double ready_s
        double prefill_s
        double rank
        double delay_s
        double score
        int64_t reused_blocks
        int64_t loaded_blocks
    struct kvfs_decode_candidate:
        uint32_t instance
        double tbt_now_s
        double tbt_s
        double alone_s
        int64_t context_tokens
        bint is_reserved
    struct kvfs_choice:
        kvfs_prefill_candidate prefill
        kvfs_decode_candidate decode
        kvfs_load *loads
        int64_t *after
        size_t load_count
        size_t after_count
        double waited_s
        int64_t tokens
        int64_t held_blocks
    struct kvfs_router:
        kvfs_costs costs
        kvfs_prefill *prefill
        kvfs_decode *decode
        kvfs_source *sources
        uint8_t *roles
        uint32_t *place_at
        uint32_t *places
        kvfs_prefill_candidate *considered
        kvfs_decode_candidate *decodes
        uint32_t prefill_count
        uint32_t decode_count
        uint32_t reserved
        double answer_tokens
        kvfs_jobs jobs
        kvfs_runs runs
    kvfs_router *kvfs_router_new(uint32_t max_flights)
    void kvfs_router_free(kvfs_router *r)
    int kvfs_route(kvfs_router *r, const kvfs_prompt *prompt, kvfs_choice *choice)
    int kvfs_weigh(kvfs_router *r, const kvfs_prompt *prompt, kvfs_choice *choice)
    int kvfs_list_loads(kvfs_router *r, const kvfs_prompt *prompt, const kvfs_prefill_candidate *candidate,
                        kvfs_choice *choice)
    int64_t kvfs_commit(kvfs_router *r, int64_t number, const kvfs_choice *choice, double now_s, double promised_s)
    uint32_t kvfs_start(kvfs_router *r, uint32_t instance, double now_s)
    void kvfs_prefilled(kvfs_router *r, uint32_t job)
    void kvfs_end_flight(kvfs_router *r, uint32_t job)
    void kvfs_dropped(kvfs_router *r, uint32_t job)

cdef extern from "cluster/legs_core.h" nogil:
    struct kvfs_legs:
        double tbt_slo_s
        int64_t leg_tokens
        bint both_legs
    int kvfs_choose_legs(kvfs_router *r, const kvfs_prompt *prompt, const kvfs_legs *legs, kvfs_choice *choice)

MAX_INSTANCES = KVFS_INSTANCES

cdef int64_t MOST_TOKENS = 1 << 31
cdef int64_t MOST_TOKEN_BYTES = 1 << 31
cdef int64_t MOST_FLIGHTS = 1 << 24


cdef int check_below(str what, int64_t number, int64_t limit) except -1:
    if not 0 <= number < limit:
        raise InvalidRequest(f"{what} {number}: must be from 0 to {limit - 1}")
    return 0


cdef tuple prefill_tuple(const kvfs_prefill_candidate *found, const kvfs_choice *choice):
    """Make the fields of `scheduler.routing.decisions.PrefillCandidate`, with the numbers of the producers."""
    cdef size_t i
    return (
        found.instance, found.queue_s, found.ready_s, found.prefill_s, found.reused_blocks,
        tuple([
            (choice.loads[i].source, choice.loads[i].first_block, choice.loads[i].blocks, choice.loads[i].size_bytes,
             choice.loads[i].busy_s) for i in range(choice.load_count)
        ]),
        tuple([choice.after[i] for i in range(choice.after_count)]),
        found.rank, found.delay_s, found.score,
    )


cdef tuple decode_tuple(const kvfs_decode_candidate *found):
    return (
        found.instance, found.tbt_now_s, found.tbt_s, found.context_tokens, found.alone_s, found.is_reserved,
    )


cdef class Choice:
    cdef kvfs_choice _choice
    # What was weighed, where it is kept.
    cdef kvfs_prefill_candidate *_considered
    cdef kvfs_decode_candidate *_decodes
    cdef uint32_t _considered_count, _decode_count

    def __dealloc__(self):
        free(self._choice.loads)
        free(self._choice.after)
        free(self._considered)
        free(self._decodes)

    cdef int keep(self, const kvfs_router *r) except -1:
        """Copy the figures of the last weighing."""
        cdef uint32_t n
        self._considered = <kvfs_prefill_candidate *>malloc(r.prefill_count * sizeof(kvfs_prefill_candidate))
        self._decodes = <kvfs_decode_candidate *>malloc(r.decode_count * sizeof(kvfs_decode_candidate))
        if (r.prefill_count and self._considered == NULL) or (r.decode_count and self._decodes == NULL):
            raise MemoryError
        for n in range(r.prefill_count):
            if r.considered[n].instance != KVFS_NOBODY:
                self._considered[self._considered_count] = r.considered[n]
                self._considered_count += 1
        for n in range(r.decode_count):
            if r.decodes[n].instance != KVFS_NOBODY:
                self._decodes[self._decode_count] = r.decodes[n]
                self._decode_count += 1
        return 0

    @property
    def considered(self):
        cdef kvfs_prefill_candidate *each
        found = []
        for n in range(self._considered_count):
            each = &self._considered[n]
            found.append((
                each.instance, each.queue_s, each.ready_s, each.prefill_s, each.reused_blocks, each.loaded_blocks,
                each.delay_s, each.score,
            ))
        return tuple(found)

    @property
    def considered_decode(self):
        return tuple([decode_tuple(&self._decodes[n]) for n in range(self._decode_count)])

    @property
    def held_blocks(self):
        return self._choice.held_blocks

    @property
    def prefill_instance(self):
        return None if self._choice.prefill.instance == KVFS_NOBODY else self._choice.prefill.instance

    @property
    def decode_instance(self):
        return None if self._choice.decode.instance == KVFS_NOBODY else self._choice.decode.instance

    @property
    def waited_s(self):
        return self._choice.waited_s

    @property
    def ttft_s(self):
        cdef kvfs_prefill_candidate *prefill = &self._choice.prefill
        if prefill.instance == KVFS_NOBODY:
            return float("inf")
        return self._choice.waited_s + (max(prefill.queue_s, prefill.ready_s) + prefill.prefill_s)

    @property
    def prefill(self):
        if self._choice.prefill.instance == KVFS_NOBODY:
            return None
        return prefill_tuple(&self._choice.prefill, &self._choice)

    @property
    def decode(self):
        return None if self._choice.decode.instance == KVFS_NOBODY else decode_tuple(&self._choice.decode)


cdef class Router:
    cdef kvfs_router *_r
    cdef readonly ClusterIndex index

    def __cinit__(self, ClusterIndex index not None, costs, uint32_t max_flights):
        if not 0 < max_flights <= MOST_FLIGHTS:
            raise InvalidRequest(f"max_flights {max_flights}: must be from 1 to {MOST_FLIGHTS}")
        self.index = index
        self._r = kvfs_router_new(max_flights)
        if self._r == NULL:
            raise MemoryError
        self.set_costs(costs)

    def __dealloc__(self):
        kvfs_router_free(self._r)

    # --- the cluster --------------------------------------------------------------------------------------
    def set_costs(self, costs):
        check_below("KV bytes of a token:", costs.kv_token_bytes, MOST_TOKEN_BYTES)
        self._r.costs = kvfs_costs(
            costs.prefill_fixed_s, costs.prefill_token_s, costs.prefill_pair_s, costs.host_bytes_s,
            costs.step_fixed_s, costs.step_context_s, costs.step_request_s,
            costs.kv_token_bytes, costs.kv_capacity_tokens,
        )

    def set_prefill(self, uint32_t instance, *, bint length_aware, bint draining=False):
        check_below("prefill instance", instance, KVFS_INSTANCES)
        cdef kvfs_prefill *prefill = &self._r.prefill[instance]
        prefill.is_length_aware, prefill.is_draining, prefill.is_there = length_aware, draining, True
        self._r.prefill_count = max(self._r.prefill_count, instance + 1)

    def set_decode(self, uint32_t instance, *, int64_t active_requests, int64_t active_tokens, bint draining=False):
        check_below("decode instance", instance, KVFS_INSTANCES)
        cdef kvfs_decode *decode = &self._r.decode[instance]
        decode.is_draining, decode.is_there = draining, True
        decode.active_requests, decode.active_tokens = active_requests, active_tokens
        self._r.decode_count = max(self._r.decode_count, instance + 1)

    def add_active(self, uint32_t instance, int64_t requests, int64_t tokens):
        check_below("decode instance", instance, KVFS_INSTANCES)
        self._r.decode[instance].active_requests += requests
        self._r.decode[instance].active_tokens += tokens

    def set_role(self, uint32_t instance, *, bint prefills, bint decodes):
        check_below("instance", instance, KVFS_INSTANCES)
        self._r.roles[instance] = (KVFS_PREFILLS if prefills else 0) | (KVFS_DECODES if decodes else 0)

    def set_source(self, uint32_t source, *, double bytes_s, double latency_s=0.0, free_at_s=None):
        check_below("source", source, KVFS_CLUSTER_SOURCES)
        if bytes_s <= 0.0:
            raise InvalidRequest(f"source {source}: {bytes_s} bytes/s: must be above 0")
        cdef kvfs_source *found = &self._r.sources[source]
        found.bytes_s, found.latency_s, found.is_there = bytes_s, latency_s, True
        if free_at_s is not None:
            found.free_at_s = free_at_s

    def map_sources(self, sources):
        cdef uint32_t place = 0
        cdef uint32_t *places
        for index_source, counts_as in sources.items():
            check_below("source of the index", index_source, KVFS_CLUSTER_SOURCES)
            for source in counts_as:
                check_below("source", source, KVFS_CLUSTER_SOURCES)
        places = <uint32_t *>malloc((1 + sum(map(len, sources.values()))) * sizeof(uint32_t))
        if places == NULL:
            raise MemoryError
        for index_source in range(KVFS_CLUSTER_SOURCES):
            self._r.place_at[index_source] = place
            for source in sources.get(index_source, ()):
                places[place] = source
                place += 1
        self._r.place_at[<uint32_t>KVFS_CLUSTER_SOURCES] = place
        free(self._r.places)
        self._r.places = places

    def source_free_at_s(self, uint32_t source):
        check_below("source", source, KVFS_CLUSTER_SOURCES)
        return self._r.sources[source].free_at_s

    def decode_load(self, uint32_t instance):
        check_below("decode instance", instance, KVFS_INSTANCES)
        cdef kvfs_decode *decode = &self._r.decode[instance]
        return decode.active_requests, decode.active_tokens, decode.committed_requests, decode.committed_tokens

    @property
    def reserved_decode(self):
        return None if self._r.reserved == KVFS_NOBODY else self._r.reserved

    @reserved_decode.setter
    def reserved_decode(self, instance):
        if instance is not None:
            check_below("decode instance", instance, KVFS_INSTANCES)
        self._r.reserved = KVFS_NOBODY if instance is None else instance

    @property
    def answer_tokens(self):
        return self._r.answer_tokens

    @answer_tokens.setter
    def answer_tokens(self, double tokens):
        self._r.answer_tokens = tokens

    # --- decisions ----------------------------------------------------------------------------------------
    cdef int collect(self, hashes, kvfs_prompt *prompt) except -1:
        cdef Py_buffer view
        cdef int rc
        check_below("tokens of a prompt:", prompt.tokens, MOST_TOKENS)
        PyObject_GetBuffer(hashes, &view, PyBUF_SIMPLE)
        try:
            if view.len % KVFS_CLUSTER_HASH_BYTES:
                raise InvalidRequest(f"hashes of {view.len} bytes: must be whole ones of {KVFS_CLUSTER_HASH_BYTES}")
            check_below("tokens of all blocks:", prompt.block_tokens * (view.len // KVFS_CLUSTER_HASH_BYTES), MOST_TOKENS)
            rc = self.index.collect_runs(
                <const uint8_t *>view.buf, view.len // KVFS_CLUSTER_HASH_BYTES, &self._r.runs
            )
        finally:
            PyBuffer_Release(&view)
        if rc < 0:
            raise MemoryError
        return 0

    def route(
        self, hashes, *, double arrival_s, int64_t tokens, int64_t block_tokens, double now_s,
        bint holds_reservation=False
    ):
        cdef kvfs_prompt prompt = kvfs_prompt(arrival_s, now_s, tokens, block_tokens, holds_reservation)
        cdef Choice choice = Choice.__new__(Choice)
        check_below("tokens of a block:", block_tokens, MOST_TOKENS)
        self.collect(hashes, &prompt)
        if kvfs_route(self._r, &prompt, &choice._choice) < 0:
            raise MemoryError
        return choice

    def choose(
        self, hashes, *, double arrival_s, int64_t tokens, int64_t block_tokens, double now_s, double tbt_slo_s,
        int64_t leg_tokens, excluded=(), bint both_legs=False, bint holds_reservation=False
    ):
        cdef kvfs_prompt prompt = kvfs_prompt(arrival_s, now_s, tokens, block_tokens, holds_reservation)
        cdef kvfs_legs legs = kvfs_legs(tbt_slo_s, leg_tokens, both_legs)
        cdef Choice choice = Choice.__new__(Choice)
        cdef int rc
        check_below("tokens of a block:", block_tokens, MOST_TOKENS)
        self.collect(hashes, &prompt)
        if not excluded:
            rc = kvfs_choose_legs(self._r, &prompt, &legs, &choice._choice)
        else:
            before = self.drain(excluded)
            rc = kvfs_choose_legs(self._r, &prompt, &legs, &choice._choice)
            self.undrain(before)
        if rc < 0:
            raise MemoryError
        choice.keep(self._r)
        return choice

    cdef list drain(self, instances):
        """Let instances take no work; return how to undo that."""
        for n in instances:
            check_below("excluded instance", n, KVFS_INSTANCES)
        before = [(n, self._r.prefill[n].is_draining, self._r.decode[n].is_draining) for n in {*instances}]
        for n, _, _ in before:
            self._r.prefill[n].is_draining = self._r.decode[n].is_draining = True
        return before

    cdef void undrain(self, list before):
        for n, prefill, decode in before:
            self._r.prefill[n].is_draining, self._r.decode[n].is_draining = prefill, decode

    def explain(
        self, hashes, *, double arrival_s, int64_t tokens, int64_t block_tokens, double now_s,
        bint holds_reservation=False
    ):
        cdef kvfs_prompt prompt = kvfs_prompt(arrival_s, now_s, tokens, block_tokens, holds_reservation)
        cdef kvfs_choice best
        cdef Choice choice
        cdef uint32_t n
        check_below("tokens of a block:", block_tokens, MOST_TOKENS)
        self.collect(hashes, &prompt)
        if kvfs_weigh(self._r, &prompt, &best) < 0:
            raise MemoryError
        found = []
        for n in range(self._r.prefill_count):
            if self._r.considered[n].instance != KVFS_NOBODY:
                choice = Choice.__new__(Choice)
                if kvfs_list_loads(self._r, &prompt, &self._r.considered[n], &choice._choice) < 0:
                    raise MemoryError
                found.append(prefill_tuple(&self._r.considered[n], &choice._choice))
        return tuple(found), tuple([
            decode_tuple(&self._r.decodes[n]) for n in range(self._r.decode_count)
            if self._r.decodes[n].instance != KVFS_NOBODY
        ])

    # --- commitments --------------------------------------------------------------------------------------
    def __len__(self):
        return self._r.jobs.in_flight

    def commit(self, int64_t number, Choice choice not None, double now_s, *, double promised_s=float("inf")):
        if number < 0:
            raise InvalidRequest(f"request {number}: must not be negative")
        cdef int64_t rc = kvfs_commit(self._r, number, &choice._choice, now_s, promised_s)
        if rc == -EEXIST:
            raise Exists(f"request {number} is in flight")
        if rc == -ENOENT:
            raise InvalidRequest(f"request {number}: no instance takes work")
        if rc == -ENOSPC:
            raise Busy(f"request {number}: {len(self)} are in flight")
        if rc < 0:
            raise MemoryError

    def start(self, uint32_t instance, double now_s):
        check_below("prefill instance", instance, KVFS_INSTANCES)
        cdef uint32_t job = kvfs_start(self._r, instance, now_s)
        return None if job == KVFS_NO_JOB else self._r.jobs.at[job].number

    def start_idle(self, double now_s):
        cdef uint32_t n, job
        found = []
        for n in range(self._r.prefill_count):
            if self._r.prefill[n].running == KVFS_NO_JOB and self._r.prefill[n].count:
                job = kvfs_start(self._r, n, now_s)
                if job != KVFS_NO_JOB:
                    found.append(self._r.jobs.at[job].number)
        return found

    def overdue(self, double now_s, double late_s):
        cdef uint32_t n
        cdef kvfs_job *job
        found = []
        for n in range(self._r.prefill_count):
            if self._r.prefill[n].running != KVFS_NO_JOB and self._r.prefill[n].count:
                job = &self._r.jobs.at[self._r.prefill[n].running]
                if now_s > job.finish_s + job.service_s + late_s:
                    found.append(job.number)
        return found

    def prefilled(self, int64_t number):
        cdef uint32_t job = self.find(number, False)
        if self._r.jobs.at[job].is_done:
            raise InvalidRequest(f"request {number} is prefilled already")
        kvfs_prefilled(self._r, job)
        return self.end_job(job)

    def joined(self, int64_t number):
        cdef uint32_t job = self.find(number, True)
        kvfs_end_flight(self._r, job)
        kvfs_job_release(&self._r.jobs, job)

    def dropped(self, int64_t number):
        cdef uint32_t job = self.find(number, True)
        kvfs_dropped(self._r, job)
        return self.end_job(job)

    def decode_of(self, int64_t number):
        cdef int32_t decode = self._r.jobs.at[self.find(number, True)].decode
        return None if decode < 0 else decode

    def job(self, int64_t number):
        cdef kvfs_job *job = &self._r.jobs.at[self.find(number, False)]
        return (
            job.instance, job.service_s, job.loaded_s, job.finish_s, job.rank, job.slack_s, job.is_started,
        )

    def prefill_load(self, uint32_t instance, double now_s):
        check_below("prefill instance", instance, KVFS_INSTANCES)
        cdef kvfs_prefill *prefill = &self._r.prefill[instance]
        cdef double queue_s = 0.0
        cdef uint32_t n
        if prefill.running != KVFS_NO_JOB:
            queue_s = max(self._r.jobs.at[prefill.running].finish_s - now_s, 0.0)
        for n in range(prefill.count):
            queue_s += self._r.jobs.at[prefill.jobs[n]].service_s
        return prefill.count, prefill.running != KVFS_NO_JOB, queue_s

    def queue(self, uint32_t instance):
        check_below("prefill instance", instance, KVFS_INSTANCES)
        cdef kvfs_prefill *prefill = &self._r.prefill[instance]
        return tuple([self._r.jobs.at[prefill.jobs[n]].number for n in range(prefill.count)])

    cdef uint32_t find(self, int64_t number, bint in_flight) except? 0:
        cdef uint32_t job = kvfs_job_find(&self._r.jobs, number)
        if job == KVFS_NO_JOB or (in_flight and not self._r.jobs.at[job].is_in_flight):
            raise NotFound(f"request {number} is not in flight")
        return job

    cdef list end_job(self, uint32_t job):
        cdef kvfs_job *done = &self._r.jobs.at[job]
        cdef uint32_t n
        followers = [self._r.jobs.at[done.followers[n].job].number for n in range(done.follower_count)]
        kvfs_job_release(&self._r.jobs, job)
        return followers

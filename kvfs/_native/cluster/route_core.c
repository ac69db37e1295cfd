/* Decisions of the default policy, and what was committed by them.
 *
 * Responsibility: what `scheduler.routing` says in `policies` (`_plan_pooled`), `route` (`decode_candidates`), `cost` and
 * `commitments`, which are the texts to read: this is the same, operation by operation and in their order, so that both
 * come to equal floats. Compiled without contraction of products and sums.
 *
 * Invariants:
 * - The DRAM of prefill instance n is source n.
 * - For each decode instance the committed requests and tokens are the sums over the flights that go to it.
 * - The index's sources are those of the router, or `places` says which: several tiers may count as one, and one tier as
 *   several, where instances share it.
 * - A prefill that the index names as a producer and that is no job here, or is done, has made its blocks.
 *
 * Costs: instances x runs of the prefix; nothing is allocated but what a prompt of more runs than any before it needs.
 *
 * Concurrency: none; one thread.
 */
#include "route_core.h"
#include "growth.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COMPUTE_WEIGHT 1.0
#define LOAD_WEIGHT 1.0
#define DEFAULT_ANSWER_TOKENS 300.0

/* --- life --------------------------------------------------------------------------------------------------------- */
struct kvfs_router *kvfs_router_new(uint32_t max_flights) {
    struct kvfs_router *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->reserved = KVFS_NOBODY;
    r->answer_tokens = DEFAULT_ANSWER_TOKENS;
    for (uint32_t i = 0; i < KVFS_INSTANCES; i++) {
        r->prefill[i].running = KVFS_NO_JOB;
        r->roles[i] = KVFS_PREFILLS | KVFS_DECODES;
    }
    if (kvfs_jobs_init(&r->jobs, max_flights) < 0) {
        kvfs_router_free(r);
        return NULL;
    }
    return r;
}

void kvfs_router_free(struct kvfs_router *r) {
    if (!r) return;
    for (uint32_t i = 0; i < KVFS_INSTANCES; i++) free(r->prefill[i].jobs);
    kvfs_jobs_destroy(&r->jobs);
    free(r->openings.at);
    free(r->openings.waiting);
    free(r->openings.copy);
    free(r->openings.ends_s);
    free(r->places);
    free(r->runs.at);
    free(r->steps);
    free(r);
}

/* --- costs -------------------------------------------------------------------------------------------------------- */
static double prefill_s(const struct kvfs_costs *c, int64_t tokens, int64_t cached) {
    const double compute_s = c->prefill_pair_s * (double)(tokens * tokens - cached * cached) +
                             c->prefill_token_s * (double)(tokens - cached) + c->prefill_fixed_s;
    const double stream_s = (double)(cached * c->kv_token_bytes) / c->host_bytes_s;
    return compute_s > stream_s ? compute_s : stream_s;
}

static double prefill_after_s(const struct kvfs_router *r, const struct kvfs_prompt *p, int64_t blocks) {
    const int64_t cached = blocks * p->block_tokens;
    return prefill_s(&r->costs, p->tokens, cached < p->tokens ? cached : p->tokens);
}

static double step_s(const struct kvfs_costs *c, int64_t context_tokens, int64_t requests) {
    return c->step_fixed_s + c->step_context_s * (double)context_tokens + c->step_request_s * (double)requests;
}

static int64_t block_bytes(const struct kvfs_router *r, const struct kvfs_prompt *p) {
    return p->block_tokens * r->costs.kv_token_bytes;
}

/* --- steps -------------------------------------------------------------------------------------------------------- */
static int holds(const struct kvfs_run *run, uint32_t source) {
    return (run->holders[source / 64] >> source % 64 & 1) != 0;
}

/* Write the holder that would have sent a run first, its wait, and its time to send. */
static void choose_source(const struct kvfs_router *r, struct kvfs_step *step, int64_t bytes, double now_s) {
    double best_s = INFINITY;
    step->source = KVFS_NOBODY;
    for (uint32_t i = 0; i < KVFS_CLUSTER_MASK_WORDS; i++) {
        for (uint64_t left = step->run->holders[i]; left; left &= left - 1) {
            const uint32_t n = 64 * i + (uint32_t)__builtin_ctzll(left);
            const struct kvfs_source *source = &r->sources[n];
            if (!source->is_there) continue;
            const double wait_s = kvfs_later(source->free_at_s - now_s, 0.0);
            const double load_s = source->latency_s + (double)((int64_t)step->run->blocks * bytes) / source->bytes_s;
            if (wait_s + load_s < best_s) {
                best_s = wait_s + load_s;
                step->source = n;
                step->wait_s = wait_s;
                step->load_s = load_s;
            }
        }
    }
}

/* Whether the prefill that is to make the run is under way. */
static int has_producer(const struct kvfs_router *r, const struct kvfs_run *run, uint32_t *job) {
    *job = run->producer < 0 ? KVFS_NO_JOB : kvfs_job_find(&r->jobs, run->producer);
    return *job != KVFS_NO_JOB && !r->jobs.at[*job].is_done;
}

/* Whether some source holds the run. */
static int map_holders(const struct kvfs_router *r, struct kvfs_run *run) {
    uint64_t held[KVFS_CLUSTER_MASK_WORDS] = {0};
    int any = 0;
    for (uint32_t i = 0; i < KVFS_CLUSTER_MASK_WORDS; i++) {
        for (uint64_t left = run->holders[i]; left; left &= left - 1) {
            const uint32_t n = 64 * i + (uint32_t)__builtin_ctzll(left);
            for (uint32_t k = r->place_at[n]; k < r->place_at[n + 1]; k++) {
                held[r->places[k] / 64] |= 1ull << r->places[k] % 64;
                any = 1;
            }
        }
    }
    memcpy(run->holders, held, sizeof held);
    return any;
}

/* Turn the runs of the index into those of the sources here: several may become one, or the prefix shorter. */
static void map_runs(struct kvfs_router *r) {
    struct kvfs_runs *runs = &r->runs;
    size_t kept = 0;
    for (size_t i = 0; i < runs->count && map_holders(r, &runs->at[i]); i++) {
        struct kvfs_run *last = kept ? &runs->at[kept - 1] : NULL;
        uint32_t job;
        if (!has_producer(r, &runs->at[i], &job)) runs->at[i].producer = KVFS_NO_PRODUCER;
        if (last && last->producer == runs->at[i].producer &&
            memcmp(last->holders, runs->at[i].holders, sizeof last->holders) == 0)
            last->blocks += runs->at[i].blocks;
        else
            runs->at[kept++] = runs->at[i];
    }
    runs->count = kept;
}

/* How many steps of the prefix there are: those up to a run that no source can send any more. */
static int64_t make_steps(struct kvfs_router *r, const struct kvfs_prompt *p) {
    int64_t first = 0;
    if (r->places) map_runs(r);
    struct kvfs_step *grown = kvfs_grow(r->steps, &r->step_room, r->runs.count, sizeof *grown);
    if (!grown) return -ENOMEM;
    r->steps = grown;
    for (size_t i = 0; i < r->runs.count; i++) {
        struct kvfs_step *step = &r->steps[i];
        *step = (struct kvfs_step){.run = &r->runs.at[i], .first_block = first};
        uint32_t job;
        if (has_producer(r, step->run, &job)) {
            step->has_producer = 1;
            step->made_s = kvfs_later(r->jobs.at[job].finish_s - p->now_s, 0.0);
        }
        choose_source(r, step, block_bytes(r, p), p->now_s);
        if (step->source == KVFS_NOBODY) return (int64_t)i;
        step->wait_s = kvfs_later(step->wait_s, step->made_s);
        first += (int64_t)step->run->blocks;
        step->prefill_s = prefill_after_s(r, p, first);
    }
    return (int64_t)r->runs.count;
}

/* --- prefill instances -------------------------------------------------------------------------------------------- */
/* A place up to which the prefix is reused. */
struct cut {
    int64_t blocks, loaded_blocks, part_blocks;
    double ready_s, load_s, part_s, prefill_s;
    size_t steps;
};

/* Take a cut unless the best so far has a smaller score. */
static void weigh_cut(const struct kvfs_router *r, const struct kvfs_prompt *p, const struct cut *cut,
                      struct kvfs_prefill_candidate *best) {
    const struct kvfs_prefill *prefill = &r->prefill[best->instance];
    const double rank = kvfs_queue_rank(prefill, p->arrival_s, cut->prefill_s);
    const double ready_s = p->now_s + cut->ready_s;
    const uint32_t place = kvfs_queue_place(&r->jobs, prefill, rank, cut->prefill_s, ready_s, r->openings.at);
    const struct kvfs_opening *opening = &r->openings.at[place];
    const double queue_s = kvfs_start_s(opening, cut->prefill_s, ready_s) - p->now_s;
    const double begin_s = queue_s > cut->ready_s ? queue_s : cut->ready_s;
    const double delay_s = kvfs_wait_added_s(opening, prefill->count - place, cut->prefill_s, ready_s);
    const double score = begin_s + cut->prefill_s + delay_s + COMPUTE_WEIGHT * cut->prefill_s +
                         LOAD_WEIGHT * cut->load_s;
    if (score <= best->score)
        *best = (struct kvfs_prefill_candidate){
            best->instance, queue_s,     cut->ready_s,       cut->prefill_s,   rank,        delay_s,
            score,          cut->blocks, cut->loaded_blocks, cut->part_blocks, cut->part_s, cut->steps};
}

/* How many blocks of a step come before the instance is free; 0 where all or none do. */
static int64_t blocks_in_time(const struct kvfs_step *step, double begin_s, double free_s) {
    if (begin_s >= free_s || begin_s + step->load_s <= free_s) return 0;
    return (int64_t)((free_s - begin_s) / step->load_s * (double)step->run->blocks);
}

/* Weigh the cut inside a step that is loaded, and add all of its load to the cut. */
static void load_step(struct kvfs_router *r, const struct kvfs_prompt *p, const struct kvfs_step *step, double free_s,
                      struct cut *cut, struct kvfs_prefill_candidate *best) {
    const double begin_s = step->wait_s + r->sent_s[step->source];
    const int64_t blocks = blocks_in_time(step, begin_s, free_s);
    if (blocks) {
        struct cut part = *cut;
        part.part_blocks = blocks;
        part.part_s = step->load_s * (double)blocks / (double)step->run->blocks;
        part.blocks = step->first_block + blocks;
        part.loaded_blocks += blocks;
        part.ready_s = kvfs_later(cut->ready_s, begin_s + part.part_s);
        part.load_s = cut->load_s + part.part_s;
        part.prefill_s = prefill_after_s(r, p, part.blocks);
        weigh_cut(r, p, &part, best);
    }
    r->sent_s[step->source] += step->load_s;
    cut->loaded_blocks += (int64_t)step->run->blocks;
    cut->load_s += step->load_s;
    cut->ready_s = kvfs_later(cut->ready_s, begin_s + step->load_s);
}

/* The candidate of the cut with the smallest score; of equals the one that reuses most. */
static int weigh_instance(struct kvfs_router *r, const struct kvfs_prompt *p, size_t step_count, double alone_s,
                          struct kvfs_prefill_candidate *best) {
    const struct kvfs_prefill *prefill = &r->prefill[best->instance];
    struct cut cut = {.prefill_s = alone_s};
    if (kvfs_queue_openings(&r->jobs, prefill, kvfs_prefill_free_s(&r->jobs, prefill, p->now_s), &r->openings) < 0)
        return -ENOMEM;
    const double free_s = r->openings.at[prefill->count].free_s - p->now_s;
    for (size_t i = 0; i < step_count; i++) r->sent_s[r->steps[i].source] = 0.0;
    best->score = INFINITY;
    weigh_cut(r, p, &cut, best);
    for (size_t i = 0; i < step_count; i++) {
        const struct kvfs_step *step = &r->steps[i];
        if (step->has_producer) cut.ready_s = kvfs_later(cut.ready_s, step->made_s);
        if (!holds(step->run, best->instance)) load_step(r, p, step, free_s, &cut, best);
        cut.blocks = step->first_block + (int64_t)step->run->blocks;
        cut.prefill_s = step->prefill_s;
        cut.steps = i + 1;
        weigh_cut(r, p, &cut, best);
    }
    return 0;
}

/* --- decode instances --------------------------------------------------------------------------------------------- */
static struct kvfs_decode_candidate weigh_decode(const struct kvfs_router *r, const struct kvfs_prompt *p, uint32_t n,
                                                 double alone_s) {
    const struct kvfs_decode *decode = &r->decode[n];
    const double growth = r->answer_tokens / 2;
    struct kvfs_decode_candidate found = {.instance = n, .alone_s = alone_s};
    int64_t context = decode->active_tokens + p->tokens, requests = decode->active_requests + 1;
    found.tbt_now_s = step_s(&r->costs, context, requests);
    context += decode->committed_tokens;
    requests += decode->committed_requests;
    found.context_tokens = (int64_t)((double)context + growth * (double)requests);
    found.tbt_s = step_s(&r->costs, found.context_tokens, requests);
    found.is_reserved = !p->holds_reservation && n == r->reserved;
    return found;
}

static double lone_step_s(const struct kvfs_router *r, const struct kvfs_prompt *p) {
    const int64_t alone = (int64_t)((double)p->tokens + r->answer_tokens / 2);
    return alone <= r->costs.kv_capacity_tokens ? step_s(&r->costs, alone, 1) : INFINITY;
}

/* --- routing ------------------------------------------------------------------------------------------------------ */
static int weigh_prefills(struct kvfs_router *r, const struct kvfs_prompt *p, struct kvfs_choice *choice) {
    const double computed_s = prefill_after_s(r, p, 0);
    const int64_t steps = make_steps(r, p);
    const struct kvfs_prefill_candidate *best = NULL;
    if (steps < 0) return -ENOMEM;
    for (size_t i = 0; i < r->runs.count; i++) choice->held_blocks += (int64_t)r->runs.at[i].blocks;
    for (uint32_t n = 0; n < r->prefill_count; n++) {
        struct kvfs_prefill_candidate *found = &r->considered[n];
        found->instance = r->prefill[n].is_there && !r->prefill[n].is_draining ? n : KVFS_NOBODY;
        if (found->instance == KVFS_NOBODY) continue;
        if (weigh_instance(r, p, (size_t)steps, computed_s, found) < 0) return -ENOMEM;
        if (!best || found->score < best->score) best = found;
    }
    if (best) choice->prefill = *best;
    return 0;
}

static void weigh_decodes(struct kvfs_router *r, const struct kvfs_prompt *p, struct kvfs_choice *choice) {
    const double alone_s = lone_step_s(r, p);
    for (uint32_t n = 0; n < r->decode_count; n++) {
        struct kvfs_decode_candidate *found = &r->decodes[n];
        found->instance = KVFS_NOBODY;
        if (r->decode[n].is_draining || !r->decode[n].is_there) continue;
        *found = weigh_decode(r, p, n, alone_s);
        if (choice->decode.instance == KVFS_NOBODY || kvfs_goes_before(found, &choice->decode)) choice->decode = *found;
    }
}

int kvfs_weigh(struct kvfs_router *r, const struct kvfs_prompt *p, struct kvfs_choice *choice) {
    *choice = (struct kvfs_choice){.prefill.instance = KVFS_NOBODY,
                                   .decode.instance = KVFS_NOBODY,
                                   .arrival_s = p->arrival_s,
                                   .waited_s = p->now_s - p->arrival_s,
                                   .tokens = p->tokens};
    if (weigh_prefills(r, p, choice) < 0) return -ENOMEM;
    weigh_decodes(r, p, choice);
    return 0;
}

static void add_load(const struct kvfs_router *r, const struct kvfs_prompt *p, const struct kvfs_step *step,
                     int64_t blocks, double busy_s, struct kvfs_choice *choice) {
    choice->loads[choice->load_count++] = (struct kvfs_load){step->source, step->first_block, blocks,
                                                             blocks * block_bytes(r, p), busy_s};
}

int kvfs_list_loads(struct kvfs_router *r, const struct kvfs_prompt *p, const struct kvfs_prefill_candidate *candidate,
                    struct kvfs_choice *choice) {
    const size_t steps = candidate->steps + (candidate->part_blocks != 0);
    choice->load_count = choice->after_count = 0;
    if (!steps) return 0;
    choice->loads = malloc(steps * sizeof *choice->loads);
    choice->after = malloc(steps * sizeof *choice->after);
    if (!choice->loads || !choice->after) return -ENOMEM;
    for (size_t i = 0; i < steps; i++) {
        const struct kvfs_step *step = &r->steps[i];
        if (step->has_producer) choice->after[choice->after_count++] = step->run->producer;
        if (i == candidate->steps)
            add_load(r, p, step, candidate->part_blocks, candidate->part_s, choice);
        else if (!holds(step->run, candidate->instance))
            add_load(r, p, step, (int64_t)step->run->blocks, step->load_s, choice);
    }
    return 0;
}

int kvfs_route(struct kvfs_router *r, const struct kvfs_prompt *p, struct kvfs_choice *choice) {
    if (kvfs_weigh(r, p, choice) < 0) return -ENOMEM;
    return choice->prefill.instance == KVFS_NOBODY ? 0 : kvfs_list_loads(r, p, &choice->prefill, choice);
}

/* --- commitments -------------------------------------------------------------------------------------------------- */
static void occupy_sources(struct kvfs_router *r, const struct kvfs_choice *choice, double now_s) {
    for (size_t i = 0; i < choice->load_count; i++) {
        struct kvfs_source *source = &r->sources[choice->loads[i].source];
        source->free_at_s = kvfs_later(source->free_at_s, now_s) + choice->loads[i].busy_s;
    }
}

static void count_flight(struct kvfs_router *r, const struct kvfs_job *job, int64_t requests) {
    if (job->decode >= 0) {
        r->decode[job->decode].committed_requests += requests;
        r->decode[job->decode].committed_tokens += requests * job->tokens;
    }
}

int64_t kvfs_commit(struct kvfs_router *r, int64_t number, const struct kvfs_choice *choice, double now_s,
                    double promised_s) {
    const struct kvfs_prefill_candidate *chosen = &choice->prefill;
    if (kvfs_job_find(&r->jobs, number) != KVFS_NO_JOB) return -EEXIST;
    if (chosen->instance == KVFS_NOBODY) return -ENOENT;
    if (r->jobs.free == KVFS_NO_JOB && r->jobs.begun == r->jobs.room) return -ENOSPC;
    const uint32_t job = kvfs_job_new(&r->jobs, number, chosen->instance, choice->after, (uint32_t)choice->after_count);
    if (job == KVFS_NO_JOB) return -ENOMEM;
    struct kvfs_job *j = &r->jobs.at[job];
    const double ttft_s = kvfs_later(chosen->queue_s, chosen->ready_s) + chosen->prefill_s;
    j->tokens = choice->tokens;
    j->service_s = chosen->prefill_s;
    j->loaded_s = choice->load_count ? now_s + chosen->ready_s : now_s;
    j->finish_s = now_s + ttft_s;
    j->rank = chosen->rank;
    j->slack_s = promised_s - (choice->waited_s + ttft_s);
    struct kvfs_prefill *prefill = &r->prefill[chosen->instance];
    const double free_s = kvfs_prefill_free_s(&r->jobs, prefill, now_s);
    if (kvfs_queue_add(&r->jobs, prefill, job, free_s, &r->openings) < 0) {
        kvfs_job_finish(&r->jobs, job);
        kvfs_job_release(&r->jobs, job);
        return -ENOMEM;
    }
    occupy_sources(r, choice, now_s);
    j->is_in_flight = 1;
    j->decode = choice->decode.instance == KVFS_NOBODY ? -1 : (int32_t)choice->decode.instance;
    count_flight(r, j, 1);
    r->jobs.in_flight++;
    return job;
}

uint32_t kvfs_start(struct kvfs_router *r, uint32_t instance, double now_s) {
    struct kvfs_prefill *prefill = &r->prefill[instance];
    if (prefill->running != KVFS_NO_JOB) return KVFS_NO_JOB;
    const uint32_t job = kvfs_queue_next(&r->jobs, prefill, now_s);
    if (job != KVFS_NO_JOB) {
        r->jobs.at[job].is_started = 1;
        r->jobs.at[job].finish_s = now_s + r->jobs.at[job].service_s;
        prefill->running = job;
    }
    return job;
}

void kvfs_prefilled(struct kvfs_router *r, uint32_t job) {
    struct kvfs_prefill *prefill = &r->prefill[r->jobs.at[job].instance];
    if (r->jobs.at[job].is_started)
        prefill->running = KVFS_NO_JOB;
    else
        kvfs_queue_remove(&r->jobs, prefill, job);
    kvfs_job_finish(&r->jobs, job);
}

void kvfs_end_flight(struct kvfs_router *r, uint32_t job) {
    struct kvfs_job *j = &r->jobs.at[job];
    count_flight(r, j, -1);
    j->is_in_flight = 0;
    r->jobs.in_flight--;
}

void kvfs_dropped(struct kvfs_router *r, uint32_t job) {
    kvfs_end_flight(r, job);
    if (r->jobs.at[job].is_done)
        r->jobs.at[job].follower_count = 0;
    else
        kvfs_prefilled(r, job);
}

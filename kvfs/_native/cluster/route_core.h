/* Decisions of the default policy, and what was committed by them. See route_core.c. */
#ifndef KVFS_CLUSTER_ROUTE_CORE_H
#define KVFS_CLUSTER_ROUTE_CORE_H

#include <stddef.h>
#include <stdint.h>

#include "cluster/index_core.h"
#include "cluster/queues_core.h"

#define KVFS_INSTANCES 1024
#define KVFS_NOBODY UINT32_MAX
/* What an instance is for, where one both prefills and decodes. */
#define KVFS_PREFILLS 1u
#define KVFS_DECODES 2u

struct kvfs_costs {
    double prefill_fixed_s, prefill_token_s, prefill_pair_s, host_bytes_s;
    double step_fixed_s, step_context_s, step_request_s;
    int64_t kv_token_bytes, kv_capacity_tokens;
};

struct kvfs_source {
    double bytes_s, latency_s, free_at_s;
    uint8_t is_there;
};

struct kvfs_decode {
    int64_t active_requests, active_tokens, committed_requests, committed_tokens;
    uint8_t is_draining, is_there;
};

struct kvfs_prompt {
    double arrival_s, now_s;
    int64_t tokens, block_tokens;
    int holds_reservation;
};

/* A run of blocks and the time to fetch it, the same for every instance. `source` is KVFS_NOBODY where none is known. */
struct kvfs_step {
    const struct kvfs_run *run;
    int64_t first_block;
    double wait_s, load_s, made_s, prefill_s; /* `prefill_s`: of a prompt that reuses all up to its end */
    uint32_t source;
    uint8_t has_producer;
};

struct kvfs_load {
    uint32_t source;
    int64_t first_block, blocks, size_bytes;
    double busy_s;
};

/* `steps` of them are reused whole, and of the next one `part_blocks`, which take `part_s`. */
struct kvfs_prefill_candidate {
    uint32_t instance;
    double queue_s, ready_s, prefill_s, rank, delay_s, score;
    int64_t reused_blocks, loaded_blocks, part_blocks;
    double part_s;
    size_t steps;
};

struct kvfs_decode_candidate {
    uint32_t instance;
    double tbt_now_s, tbt_s, alone_s;
    int64_t context_tokens;
    uint8_t is_reserved;
};

/* What to commit. `loads` and `after` are the caller's to free. */
struct kvfs_choice {
    struct kvfs_prefill_candidate prefill; /* its instance is KVFS_NOBODY where none takes work; so is decode's */
    struct kvfs_decode_candidate decode;
    struct kvfs_load *loads;
    int64_t *after;
    size_t load_count, after_count;
    double arrival_s, waited_s;
    int64_t tokens, held_blocks;
};

struct kvfs_router {
    struct kvfs_costs costs;
    struct kvfs_prefill prefill[KVFS_INSTANCES];
    struct kvfs_decode decode[KVFS_INSTANCES];
    struct kvfs_source sources[KVFS_CLUSTER_SOURCES];
    double sent_s[KVFS_CLUSTER_SOURCES]; /* by a source, in one weighing */
    uint8_t roles[KVFS_INSTANCES];       /* KVFS_PREFILLS, KVFS_DECODES, or both */
    /* Source n of the index counts as `places[place_at[n]]` to before `places[place_at[n + 1]]`; without places as n. */
    uint32_t place_at[KVFS_CLUSTER_SOURCES + 1], *places;
    /* What the last weighing found; instances that take no work have KVFS_NOBODY. */
    struct kvfs_prefill_candidate considered[KVFS_INSTANCES];
    struct kvfs_decode_candidate decodes[KVFS_INSTANCES];
    uint32_t prefill_count, decode_count;
    uint32_t reserved; /* decode instance, or KVFS_NOBODY */
    double answer_tokens;
    struct kvfs_jobs jobs;
    struct kvfs_openings openings;
    struct kvfs_runs runs;
    struct kvfs_step *steps;
    uint32_t step_room;
};

struct kvfs_router *kvfs_router_new(uint32_t max_flights);
void kvfs_router_free(struct kvfs_router *r);

/* Weighs the runs of `r->runs`, and writes the best of each kind into the choice: 0 or -ENOMEM. */
int kvfs_weigh(struct kvfs_router *r, const struct kvfs_prompt *prompt, struct kvfs_choice *choice);
/* Writes loads and producers of a candidate of the last weighing into the choice: 0 or -ENOMEM. */
int kvfs_list_loads(struct kvfs_router *r, const struct kvfs_prompt *prompt,
                    const struct kvfs_prefill_candidate *candidate, struct kvfs_choice *choice);
/* Both, for the best ones. */
int kvfs_route(struct kvfs_router *r, const struct kvfs_prompt *prompt, struct kvfs_choice *choice);

/* The job, -EEXIST for a number in flight, -ENOENT without an instance, -ENOMEM or -ENOSPC (max_flights). */
int64_t kvfs_commit(struct kvfs_router *r, int64_t number, const struct kvfs_choice *choice, double now_s,
                    double promised_s);
/* The job that an idle instance starts now, or KVFS_NO_JOB. */
uint32_t kvfs_start(struct kvfs_router *r, uint32_t instance, double now_s);
/* These mark the job done, or its flight ended; the caller reads its followers, and releases it. A prefill that is done
 * may not have been started: the engine took another order. */
void kvfs_prefilled(struct kvfs_router *r, uint32_t job);
void kvfs_end_flight(struct kvfs_router *r, uint32_t job);
void kvfs_dropped(struct kvfs_router *r, uint32_t job);

static inline int kvfs_goes_before(const struct kvfs_decode_candidate *a, const struct kvfs_decode_candidate *b) {
    if (a->is_reserved != b->is_reserved) return b->is_reserved;
    return a->tbt_s < b->tbt_s;
}

#endif

/* Which instances the candidates of a weighing make: one that does both, or a prefill leg and a decode leg.
 *
 * Responsibility: what `scheduler.conductor.planning.legs` says, which is the text to read: the same choice, with the
 * same winner among equals, the first.
 *
 * Invariants: prefill instance n and decode instance n are one.
 *
 * Concurrency: none; one thread.
 */
#include "legs_core.h"

#include <math.h>

static int does_both(const struct kvfs_router *r, uint32_t n) { return r->roles[n] == (KVFS_PREFILLS | KVFS_DECODES); }

/* Whether the request fits the batch of instance n. */
static int fits(const struct kvfs_router *r, const struct kvfs_legs *legs, uint32_t n) {
    const struct kvfs_decode_candidate *decode = &r->decodes[n];
    return n < r->decode_count && decode->instance == n && decode->tbt_s <= legs->tbt_slo_s && !decode->is_reserved &&
           decode->context_tokens <= r->costs.kv_capacity_tokens;
}

static double ttft_s(const struct kvfs_prefill_candidate *found) {
    return kvfs_later(found->queue_s, found->ready_s) + found->prefill_s;
}

/* The instance of the smallest score that prefills; with `alone` one that decodes as well, in a batch with room. */
static uint32_t best_prefill(const struct kvfs_router *r, const struct kvfs_legs *legs, int alone) {
    uint32_t best = KVFS_NOBODY;
    for (uint32_t n = 0; n < r->prefill_count; n++) {
        if (r->considered[n].instance == KVFS_NOBODY || !(r->roles[n] & KVFS_PREFILLS)) continue;
        if (alone && !(does_both(r, n) && fits(r, legs, n))) continue;
        if (best == KVFS_NOBODY || r->considered[n].score < r->considered[best].score) best = n;
    }
    return best;
}

static uint32_t best_decode(const struct kvfs_router *r, const struct kvfs_legs *legs) {
    uint32_t best = KVFS_NOBODY;
    for (uint32_t n = 0; n < r->decode_count; n++) {
        if (r->decodes[n].instance == KVFS_NOBODY || !(r->roles[n] & KVFS_DECODES)) continue;
        if (legs->both_legs && does_both(r, n)) continue;
        if (best == KVFS_NOBODY || kvfs_goes_before(&r->decodes[n], &r->decodes[best])) best = n;
    }
    return best;
}

/* The instance that decodes and prefills as well, since that is not worth a leg, or, labelled for decoding, is there
 * sooner than one. */
static uint32_t decode_alone(const struct kvfs_router *r, const struct kvfs_prompt *p, const struct kvfs_legs *legs,
                             uint32_t first) {
    uint32_t best = KVFS_NOBODY;
    for (uint32_t n = 0; n < r->prefill_count; n++) {
        const struct kvfs_prefill_candidate *found = &r->considered[n];
        if (found->instance == KVFS_NOBODY || !(r->roles[n] & KVFS_DECODES) || !fits(r, legs, n)) continue;
        if (legs->both_legs && !does_both(r, n)) continue;
        /* A prefill stalls the instance's batch for as long as it takes. */
        const int sooner = first == KVFS_NOBODY ||
                           (ttft_s(found) < ttft_s(&r->considered[first]) && found->prefill_s <= legs->tbt_slo_s);
        if (p->tokens - found->reused_blocks * p->block_tokens >= legs->leg_tokens &&
            !(sooner && r->roles[n] == KVFS_DECODES))
            continue;
        if (best == KVFS_NOBODY || ttft_s(found) < ttft_s(&r->considered[best])) best = n;
    }
    return best;
}

static void take(const struct kvfs_router *r, uint32_t prefill, uint32_t decode, struct kvfs_choice *choice) {
    choice->prefill.instance = choice->decode.instance = KVFS_NOBODY;
    if (prefill != KVFS_NOBODY) choice->prefill = r->considered[prefill];
    if (decode != KVFS_NOBODY) choice->decode = r->decodes[decode];
}

static void take_legs(const struct kvfs_router *r, const struct kvfs_prompt *p, const struct kvfs_legs *legs,
                      struct kvfs_choice *choice) {
    const uint32_t first = best_prefill(r, legs, 0);
    const int both = first != KVFS_NOBODY && does_both(r, first);
    const uint32_t alone = both ? best_prefill(r, legs, 1) : decode_alone(r, p, legs, first);
    if (alone != KVFS_NOBODY)
        take(r, alone, alone, choice);
    else if (both)
        take(r, first, first < r->decode_count ? r->decodes[first].instance : KVFS_NOBODY, choice);
    else
        take(r, first, best_decode(r, legs), choice);
}

int kvfs_choose_legs(struct kvfs_router *r, const struct kvfs_prompt *p, const struct kvfs_legs *legs,
                     struct kvfs_choice *choice) {
    const int rc = kvfs_weigh(r, p, choice);
    if (rc < 0) return rc;
    const uint32_t first = choice->prefill.instance;
    if (first != KVFS_NOBODY && does_both(r, first) && fits(r, legs, first))
        choice->decode = r->decodes[first];
    else
        take_legs(r, p, legs, choice);
    return choice->prefill.instance == KVFS_NOBODY ? 0 : kvfs_list_loads(r, p, &choice->prefill, choice);
}

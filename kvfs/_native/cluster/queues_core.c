/* Prefills that were committed, and the order in which instances do them.
 *
 * Responsibility: what `scheduler.routing.queues` says, which is the text to read: this is the same, operation by
 * operation, so that both come to equal floats.
 *
 * Invariants: a job is in the chain of its number until it is done and in no flight. `after` has jobs that are not done.
 * `followers` may name jobs that ended: their serial differs.
 *
 * Concurrency: none; one thread.
 */
#include "queues_core.h"
#include "growth.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define AGEING 2.0

/* A job that waits for its blocks: when they are there, from when on it holds others up, its service, when it has to end
 * at the latest, and its place. */
struct kvfs_waiting {
    double ready_s, holds_s, service_s, due_s;
    uint32_t place;
};

struct waiting_list {
    struct kvfs_waiting *at;
    uint32_t count;
};

/* --- jobs --------------------------------------------------------------------------------------------------------- */
int kvfs_jobs_init(struct kvfs_jobs *jobs, uint32_t room) {
    uint32_t heads = 64;
    while (heads < room) heads *= 2;
    *jobs = (struct kvfs_jobs){.mask = heads - 1, .room = room, .free = KVFS_NO_JOB};
    jobs->at = calloc(room, sizeof *jobs->at);
    jobs->heads = malloc(heads * sizeof *jobs->heads);
    if (!jobs->at || !jobs->heads) return -ENOMEM;
    memset(jobs->heads, 0xff, heads * sizeof *jobs->heads);
    return 0;
}

void kvfs_jobs_destroy(struct kvfs_jobs *jobs) {
    for (uint32_t i = 0; i < jobs->begun; i++) {
        free(jobs->at[i].after);
        free(jobs->at[i].followers);
    }
    free(jobs->at);
    free(jobs->heads);
}

static uint32_t *head_of(const struct kvfs_jobs *jobs, int64_t number) {
    return &jobs->heads[(uint64_t)number * 0x9e3779b97f4a7c15ull >> 32 & jobs->mask];
}

uint32_t kvfs_job_find(const struct kvfs_jobs *jobs, int64_t number) {
    uint32_t job = *head_of(jobs, number);
    while (job != KVFS_NO_JOB && jobs->at[job].number != number) job = jobs->at[job].chain;
    return job;
}

static int add_follower(struct kvfs_job *job, struct kvfs_job_ref follower) {
    struct kvfs_job_ref *grown = kvfs_grow(job->followers, &job->follower_room, job->follower_count + 1u,
                                           sizeof *grown);
    if (!grown) return -ENOMEM;
    job->followers = grown;
    job->followers[job->follower_count++] = follower;
    return 0;
}

static int has_after(const struct kvfs_job *job, uint32_t other) {
    for (uint32_t i = 0; i < job->after_count; i++)
        if (job->after[i] == other) return 1;
    return 0;
}

static int wait_for(struct kvfs_jobs *jobs, uint32_t job, const int64_t *after, uint32_t count) {
    struct kvfs_job *j = &jobs->at[job];
    j->after = count ? malloc(count * sizeof *j->after) : NULL;
    if (count && !j->after) return -ENOMEM;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t other = kvfs_job_find(jobs, after[i]);
        if (other == KVFS_NO_JOB || jobs->at[other].is_done || has_after(j, other)) continue;
        if (add_follower(&jobs->at[other], (struct kvfs_job_ref){job, j->serial}) < 0) return -ENOMEM;
        j->after[j->after_count++] = other;
    }
    return 0;
}

uint32_t kvfs_job_new(struct kvfs_jobs *jobs, int64_t number, uint32_t instance, const int64_t *after, uint32_t count) {
    uint32_t job = jobs->free;
    if (job != KVFS_NO_JOB)
        jobs->free = jobs->at[job].chain;
    else if (jobs->begun < jobs->room)
        job = jobs->begun++;
    else
        return KVFS_NO_JOB;
    struct kvfs_job *j = &jobs->at[job];
    *j = (struct kvfs_job){.number = number, .instance = instance, .serial = j->serial + 1, .decode = -1};
    const int rc = wait_for(jobs, job, after, count);
    j->chain = *head_of(jobs, number);
    *head_of(jobs, number) = job;
    if (rc < 0) {
        kvfs_job_finish(jobs, job);
        kvfs_job_release(jobs, job);
        return KVFS_NO_JOB;
    }
    return job;
}

void kvfs_job_finish(struct kvfs_jobs *jobs, uint32_t job) {
    struct kvfs_job *j = &jobs->at[job];
    uint32_t left = 0;
    j->is_done = 1;
    for (uint32_t i = 0; i < j->follower_count; i++) {
        const struct kvfs_job_ref ref = j->followers[i];
        struct kvfs_job *follower = &jobs->at[ref.job];
        if (follower->serial != ref.serial || follower->is_done) continue;
        for (uint32_t k = 0; k < follower->after_count; k++)
            if (follower->after[k] == job) follower->after[k--] = follower->after[--follower->after_count];
        j->followers[left++] = ref;
    }
    j->follower_count = left;
}

void kvfs_job_release(struct kvfs_jobs *jobs, uint32_t job) {
    struct kvfs_job *j = &jobs->at[job];
    if (!j->is_done || j->is_in_flight) return;
    uint32_t *link = head_of(jobs, j->number);
    while (*link != job) link = &jobs->at[*link].chain;
    *link = j->chain;
    free(j->after);
    free(j->followers);
    j->after = NULL;
    j->followers = NULL;
    j->serial++;
    j->chain = jobs->free;
    jobs->free = job;
}

/* When its blocks are there, as predicted, and from when on it holds others up for them. */
static struct kvfs_waiting blocks_s(const struct kvfs_jobs *jobs, const struct kvfs_job *job) {
    struct kvfs_waiting waiting = {job->loaded_s, 0.0, job->service_s, job->finish_s + job->slack_s, 0};
    for (uint32_t i = 0; i < job->after_count; i++) {
        const struct kvfs_job *other = &jobs->at[job->after[i]];
        if (other->instance != job->instance) {
            waiting.ready_s = kvfs_later(waiting.ready_s, other->finish_s);
            if (!other->is_started) waiting.holds_s = kvfs_later(waiting.holds_s, other->finish_s - other->service_s);
        }
    }
    return waiting;
}

/* --- openings ----------------------------------------------------------------------------------------------------- */
static double sooner(double a, double b) { return b < a ? b : a; }

/* Start the jobs that go before one of this service, removing them; when it starts itself. `ends_s` may be NULL. */
static double advance(struct waiting_list *waiting, double free_s, double service_s, double *ends_s) {
    double passed_s = 0.0;
    for (uint32_t place = 0; place < waiting->count;) {
        const struct kvfs_waiting w = waiting->at[place];
        passed_s += w.service_s;
        const double latest_s = w.holds_s <= free_s ? w.ready_s : w.due_s - passed_s;
        if (w.ready_s <= free_s || (free_s + service_s > latest_s && latest_s >= w.ready_s)) {
            free_s = kvfs_later(w.ready_s, free_s) + w.service_s;
            if (ends_s) ends_s[w.place] = free_s;
            waiting->count--;
            memmove(&waiting->at[place], &waiting->at[place + 1], (waiting->count - place) * sizeof w);
            place = 0;
            passed_s = 0.0;
        } else {
            place++;
        }
    }
    return free_s;
}

/* By when a job has to end that goes before those that wait; infinity where it may take any time. */
static double held_s(const struct waiting_list *waiting, double free_s) {
    double held = INFINITY, passed_s = 0.0;
    for (uint32_t i = 0; i < waiting->count; i++) {
        const struct kvfs_waiting *w = &waiting->at[i];
        if (w->holds_s <= free_s) return sooner(held, w->ready_s);
        passed_s += w->service_s;
        if (w->due_s - passed_s >= w->ready_s) held = sooner(held, w->due_s - passed_s);
    }
    return held;
}

/* How much later a job of this service may start and still go before those that wait. */
static double margin_s(const struct waiting_list *waiting, double free_s, double service_s) {
    double margin = INFINITY, passed_s = 0.0;
    const double end_s = free_s + service_s;
    for (uint32_t i = 0; i < waiting->count; i++) {
        const struct kvfs_waiting *w = &waiting->at[i];
        if (w->holds_s <= free_s) return sooner(margin, w->ready_s - end_s);
        passed_s += w->service_s;
        if (w->due_s - passed_s >= w->ready_s) margin = sooner(margin, w->due_s - passed_s - end_s);
        margin = sooner(margin, kvfs_later(w->ready_s - end_s, w->holds_s - free_s));
    }
    return margin;
}

/* The opening behind the jobs so far, without a slack. */
static struct kvfs_opening gap(struct waiting_list *waiting, double free_s, struct kvfs_openings *o) {
    if (!waiting->count) return (struct kvfs_opening){free_s, INFINITY, free_s, INFINITY};
    free_s = advance(waiting, free_s, 0.0, o->ends_s);
    const double held = held_s(waiting, free_s);
    double later = free_s;
    if (held != INFINITY) {
        struct waiting_list copy = {o->copy, waiting->count};
        memcpy(o->copy, waiting->at, waiting->count * sizeof *o->copy);
        later = advance(&copy, free_s, INFINITY, NULL);
    }
    return (struct kvfs_opening){free_s, held, later, INFINITY};
}

static void end_all(struct waiting_list *waiting, double free_s, double *ends_s) {
    free_s = advance(waiting, free_s, INFINITY, ends_s);
    for (uint32_t i = 0; i < waiting->count; i++) {
        free_s = kvfs_later(waiting->at[i].ready_s, free_s) + waiting->at[i].service_s;
        ends_s[waiting->at[i].place] = free_s;
    }
}

static int grow_openings(struct kvfs_openings *o, uint32_t wanted) {
    const uint32_t room = wanted < 64 ? 64 : 2 * wanted;
    if (wanted <= o->room) return 0;
    void *at = realloc(o->at, room * sizeof *o->at);
    o->at = at ? at : o->at;
    void *waiting = realloc(o->waiting, room * sizeof *o->waiting);
    o->waiting = waiting ? waiting : o->waiting;
    void *copy = realloc(o->copy, room * sizeof *o->copy);
    o->copy = copy ? copy : o->copy;
    void *ends_s = realloc(o->ends_s, room * sizeof *o->ends_s);
    o->ends_s = ends_s ? ends_s : o->ends_s;
    if (!at || !waiting || !copy || !ends_s) return -ENOMEM;
    o->room = room;
    return 0;
}

double kvfs_prefill_free_s(const struct kvfs_jobs *jobs, const struct kvfs_prefill *prefill, double now_s) {
    return prefill->running == KVFS_NO_JOB ? now_s : kvfs_later(jobs->at[prefill->running].finish_s, now_s);
}

double kvfs_queue_rank(const struct kvfs_prefill *prefill, double arrival_s, double service_s) {
    return prefill->is_length_aware ? arrival_s + AGEING * service_s : arrival_s;
}

int kvfs_queue_openings(const struct kvfs_jobs *jobs, const struct kvfs_prefill *prefill, double free_s,
                        struct kvfs_openings *o) {
    if (grow_openings(o, prefill->count + 1) < 0) return -ENOMEM;
    struct waiting_list waiting = {o->waiting, 0};
    for (uint32_t i = 0; i < prefill->count; i++) {
        const struct kvfs_job *job = &jobs->at[prefill->jobs[i]];
        o->at[i] = gap(&waiting, free_s, o);
        free_s = o->at[i].free_s;
        struct kvfs_waiting blocks = blocks_s(jobs, job);
        if (blocks.ready_s > free_s) {
            blocks.place = i;
            waiting.at[waiting.count++] = blocks;
            continue;
        }
        if (waiting.count) {
            free_s = advance(&waiting, free_s, job->service_s, o->ends_s);
            if (job->slack_s < INFINITY) o->at[i].slack_s = margin_s(&waiting, free_s, job->service_s);
        }
        free_s += job->service_s;
        o->ends_s[i] = free_s;
    }
    o->at[prefill->count] = gap(&waiting, free_s, o);
    end_all(&waiting, o->at[prefill->count].free_s, o->ends_s);
    for (uint32_t i = 0; i < prefill->count; i++) {
        const struct kvfs_job *job = &jobs->at[prefill->jobs[i]];
        o->at[i].slack_s = sooner(o->at[i].slack_s, job->slack_s - (o->ends_s[i] - job->finish_s));
    }
    return 0;
}

/* --- queues ------------------------------------------------------------------------------------------------------- */
uint32_t kvfs_queue_place(const struct kvfs_jobs *jobs, const struct kvfs_prefill *prefill, double rank,
                          double service_s, double ready_s, const struct kvfs_opening *openings) {
    uint32_t place = prefill->count, first = 0;
    for (uint32_t end = prefill->count; first < end;) {
        const uint32_t middle = (first + end) / 2;
        if (rank < jobs->at[prefill->jobs[middle]].rank)
            end = middle;
        else
            first = middle + 1;
    }
    double slack_s = INFINITY;
    for (; place > first; place--) {
        const struct kvfs_opening *opening = &openings[place - 1];
        const double wait_s = ready_s - kvfs_start_s(opening, service_s, ready_s);
        slack_s = sooner(slack_s, opening->slack_s);
        if (slack_s < (wait_s > 0.0 ? service_s + wait_s : service_s)) break;
    }
    return place;
}

double kvfs_wait_added_s(const struct kvfs_opening *at_place, uint32_t behind, double service_s, double ready_s) {
    const double begin_s = kvfs_later(kvfs_start_s(at_place, service_s, ready_s), ready_s);
    for (; behind && at_place[1].free_s <= begin_s; behind--) at_place++;
    const double still_s = kvfs_later(begin_s - kvfs_start_s(at_place, service_s, ready_s), 0.0);
    return (double)behind * (still_s + service_s);
}

static void pop(struct kvfs_prefill *prefill, uint32_t place) {
    prefill->count--;
    memmove(&prefill->jobs[place], &prefill->jobs[place + 1], (prefill->count - place) * sizeof *prefill->jobs);
}

int kvfs_queue_add(struct kvfs_jobs *jobs, struct kvfs_prefill *prefill, uint32_t job, double free_s,
                   struct kvfs_openings *openings) {
    struct kvfs_job *j = &jobs->at[job];
    uint32_t *grown = kvfs_grow(prefill->jobs, &prefill->room, prefill->count + 1u, sizeof *grown);
    if (!grown) return -ENOMEM;
    prefill->jobs = grown;
    if (kvfs_queue_openings(jobs, prefill, free_s, openings) < 0) return -ENOMEM;
    const double ready_s = blocks_s(jobs, j).ready_s;
    const uint32_t place = kvfs_queue_place(jobs, prefill, j->rank, j->service_s, ready_s, openings->at);
    if (place) j->rank = kvfs_later(j->rank, jobs->at[prefill->jobs[place - 1]].rank);
    memmove(&prefill->jobs[place + 1], &prefill->jobs[place], (prefill->count - place) * sizeof *prefill->jobs);
    prefill->jobs[place] = job;
    prefill->count++;
    if (kvfs_queue_openings(jobs, prefill, free_s, openings) < 0) {
        pop(prefill, place);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < prefill->count; i++) {
        j = &jobs->at[prefill->jobs[i]];
        j->slack_s -= openings->ends_s[i] - j->finish_s;
        j->finish_s = openings->ends_s[i];
    }
    return 0;
}

int kvfs_queue_remove(struct kvfs_jobs *jobs, struct kvfs_prefill *prefill, uint32_t job) {
    for (uint32_t place = 0; place < prefill->count; place++) {
        if (prefill->jobs[place] == job) {
            pop(prefill, place);
            for (; place < prefill->count; place++) {
                jobs->at[prefill->jobs[place]].slack_s += jobs->at[job].service_s;
                jobs->at[prefill->jobs[place]].finish_s -= jobs->at[job].service_s;
            }
            return 1;
        }
    }
    return 0;
}

/* When a job that waits is held up until; infinity where a prefill that it waits for has not started. */
static double held_until(const struct kvfs_jobs *jobs, const struct kvfs_job *job) {
    double until_s = job->loaded_s;
    for (uint32_t i = 0; i < job->after_count; i++) {
        if (!jobs->at[job->after[i]].is_started) return INFINITY;
        until_s = kvfs_later(until_s, jobs->at[job->after[i]].finish_s);
    }
    return until_s;
}

uint32_t kvfs_queue_next(struct kvfs_jobs *jobs, struct kvfs_prefill *prefill, double now_s) {
    double until_s = INFINITY, passed_s = 0.0;
    int is_held = 0;
    for (uint32_t place = 0; place < prefill->count; place++) {
        const uint32_t job = prefill->jobs[place];
        const struct kvfs_job *j = &jobs->at[job];
        const int is_ready = j->loaded_s <= now_s && !j->after_count;
        if (is_ready && now_s + j->service_s <= until_s) {
            pop(prefill, place);
            return job;
        }
        if (is_held) continue;
        const double held = is_ready ? INFINITY : held_until(jobs, j);
        if (held != INFINITY) {
            until_s = sooner(until_s, held);
            is_held = 1;
            continue;
        }
        passed_s += j->service_s;
        const double latest_s = j->finish_s + j->slack_s - passed_s;
        if (latest_s >= kvfs_later(now_s, blocks_s(jobs, j).ready_s)) until_s = sooner(until_s, latest_s);
    }
    return KVFS_NO_JOB;
}

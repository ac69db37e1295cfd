/* Prefills that were committed, and the order in which instances do them. See queues_core.c. */
#ifndef KVFS_CLUSTER_QUEUES_CORE_H
#define KVFS_CLUSTER_QUEUES_CORE_H

#include <stdint.h>

#define KVFS_NO_JOB UINT32_MAX

struct kvfs_job_ref {
    uint32_t job, serial;
};

/* A prefill that was committed. It ends when it is done, and its request is in no flight any more. */
struct kvfs_job {
    int64_t number, tokens;
    double service_s, loaded_s, finish_s, rank, slack_s;
    uint32_t *after; /* jobs that are not done, whose blocks it waits for */
    struct kvfs_job_ref *followers;
    uint32_t after_count, follower_count, follower_room;
    uint32_t instance, serial, chain;
    int32_t decode; /* or -1 */
    uint8_t is_started, is_done, is_in_flight;
};

struct kvfs_jobs {
    struct kvfs_job *at;
    uint32_t *heads, mask;
    uint32_t room, begun, free, in_flight;
};

/* One engine that prefills: `jobs` have not started, in order of rank. */
struct kvfs_prefill {
    uint32_t *jobs, count, room;
    uint32_t running; /* or KVFS_NO_JOB */
    uint8_t is_length_aware, is_draining, is_there;
};

/* When an instance is free, by when a job has to end that starts then, when the instance is free for those that end
 * later, and how much later the job at this place may become. */
struct kvfs_opening {
    double free_s, held_s, later_s, slack_s;
};

/* Room for what `kvfs_queue_openings` works on. */
struct kvfs_openings {
    struct kvfs_opening *at;
    struct kvfs_waiting *waiting, *copy;
    double *ends_s; /* of each job, as predicted */
    uint32_t room;
};

int kvfs_jobs_init(struct kvfs_jobs *jobs, uint32_t room);
void kvfs_jobs_destroy(struct kvfs_jobs *jobs);
/* The job of a number, or KVFS_NO_JOB. */
uint32_t kvfs_job_find(const struct kvfs_jobs *jobs, int64_t number);
/* A job of this number that waits for those of `after` that are not done: KVFS_NO_JOB without memory. */
uint32_t kvfs_job_new(struct kvfs_jobs *jobs, int64_t number, uint32_t instance, const int64_t *after, uint32_t count);
/* Marks a job done; `followers` are then its own to be read and freed, those that are left of the jobs that waited. */
void kvfs_job_finish(struct kvfs_jobs *jobs, uint32_t job);
/* Frees a job that is done and in no flight. */
void kvfs_job_release(struct kvfs_jobs *jobs, uint32_t job);

double kvfs_prefill_free_s(const struct kvfs_jobs *jobs, const struct kvfs_prefill *prefill, double now_s);
double kvfs_queue_rank(const struct kvfs_prefill *prefill, double arrival_s, double service_s);
/* Writes the opening at each place, one more than there are jobs, and when each job ends: 0 or -ENOMEM. */
int kvfs_queue_openings(const struct kvfs_jobs *jobs, const struct kvfs_prefill *prefill, double free_s,
                        struct kvfs_openings *openings);
uint32_t kvfs_queue_place(const struct kvfs_jobs *jobs, const struct kvfs_prefill *prefill, double rank,
                          double service_s, double ready_s, const struct kvfs_opening *openings);
int kvfs_queue_add(struct kvfs_jobs *jobs, struct kvfs_prefill *prefill, uint32_t job, double free_s,
                   struct kvfs_openings *openings);
/* Whether the job was there. */
int kvfs_queue_remove(struct kvfs_jobs *jobs, struct kvfs_prefill *prefill, uint32_t job);
/* Removes the job to start now, or KVFS_NO_JOB. */
uint32_t kvfs_queue_next(struct kvfs_jobs *jobs, struct kvfs_prefill *prefill, double now_s);

static inline double kvfs_later(double a, double b) { return b > a ? b : a; }

/* When an instance is free for a job of this service whose blocks are there at `ready_s`. */
static inline double kvfs_start_s(const struct kvfs_opening *opening, double service_s, double ready_s) {
    const double start_s = kvfs_later(opening->free_s, ready_s);
    return start_s + service_s <= opening->held_s ? opening->free_s : opening->later_s;
}

/* The waiting that a job which takes this place adds to all those behind it, of which there are `behind`. */
double kvfs_wait_added_s(const struct kvfs_opening *at_place, uint32_t behind, double service_s, double ready_s);

#endif

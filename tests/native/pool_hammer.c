/* Batches of several callers at once, shared out as fast as they come.
 *
 * pool_hammer ROUNDS: CALLERS threads begin ROUNDS batches each, at once, and wait for each other: one that is not woken
 * is woken by no later batch either. Prints "done", and how many blocks helpers took; "wrong" where a block was taken
 * twice or not at all, or a helper was in a batch after its caller had returned.
 */
#include "blocks/pool.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { CALLERS = 8, BLOCKS = 2, MOST_STEPS = 20000 };

struct batch {
    struct kvfs_pool_job shared;
    pthread_t caller;
    int next, inside;
    int taken[BLOCKS];
    unsigned steps; /* of each block */
};

static pthread_barrier_t barrier;
static int wrong;
static unsigned long helped;

static void take(struct kvfs_pool_job *shared) {
    struct batch *batch = (struct batch *)shared;
    const int helps = !pthread_equal(pthread_self(), batch->caller);
    __atomic_add_fetch(&batch->inside, 1, __ATOMIC_RELAXED);
    for (;;) {
        const int i = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED);
        if (i >= BLOCKS) break;
        for (volatile unsigned step = 0; step < batch->steps; step++)
            ;
        batch->taken[i]++;
        __atomic_add_fetch(&helped, helps, __ATOMIC_RELAXED);
    }
    __atomic_sub_fetch(&batch->inside, 1, __ATOMIC_RELAXED);
}

static void *call(void *argument) {
    const long rounds = *(const long *)argument;
    unsigned seed = (unsigned)(size_t)&rounds;
    for (long round = 0; round < rounds; round++) {
        struct batch batch = {.shared = {.work = take}, .caller = pthread_self()};
        batch.steps = (unsigned)rand_r(&seed) % MOST_STEPS;
        pthread_barrier_wait(&barrier);
        kvfs_pool_run(&batch.shared, 1);
        int once = __atomic_load_n(&batch.inside, __ATOMIC_RELAXED) == 0;
        for (int i = 0; i < BLOCKS; i++) once = once && batch.taken[i] == 1;
        if (!once) __atomic_store_n(&wrong, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[CALLERS];
    long rounds = argc > 1 ? atol(argv[1]) : 1000;
    pthread_barrier_init(&barrier, NULL, CALLERS);
    for (int i = 0; i < CALLERS; i++) pthread_create(&threads[i], NULL, call, &rounds);
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
    printf(wrong ? "wrong\n" : "done %lu\n", helped);
    return wrong;
}

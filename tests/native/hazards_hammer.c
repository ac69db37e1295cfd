/* The service and two clients' threads at one pool's slots: seconds of leases against reuse.
 *
 * hazards_hammer ROUNDS: a service retires, reuses and seals slots, ROUNDS times; readers lease what is sealed and check
 * that every word is of its generation. Prints "done", and how often a slot could not be reused, or "torn".
 * BREAK_CLIENT: readers do not look at the generation again. BREAK_SERVICE: the service does not look at hazards.
 */
#include "hbm/hazards_core.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

enum { SLOTS = 4, WORDS = 256, READERS = 2, PLACES = 8 };

/* Each is mapped once, so that ThreadSanitizer knows both sides to mean the same. */
static struct kvfs_words generations, hazards[READERS];
static int stopped;
static uint64_t payload[SLOTS][WORDS];
static uint64_t torn, reads;

static int64_t lease(const struct kvfs_words *own, uint32_t slot, uint64_t generation) {
#ifdef BREAK_CLIENT
    __atomic_store_n(&own->at[0], (uint64_t)slot << KVFS_HAZARD_GENERATION_BITS | generation, __ATOMIC_SEQ_CST);
    return generation & 1 || generation == 0 ? -1 : 0;
#else
    return kvfs_hazard_publish(own, &generations, slot, generation);
#endif
}

static void *read_slots(void *argument) {
    struct kvfs_words mine = *(struct kvfs_words *)argument;
    uint32_t slot = 0;
    while (!__atomic_load_n(&stopped, __ATOMIC_RELAXED)) {
        slot = (slot + 1) % SLOTS;
        const uint64_t generation = kvfs_generation_get(&generations, slot);
        const int64_t place = lease(&mine, slot, generation);
        if (place < 0) continue;
        uint64_t wrong = 0;
        for (unsigned word = 0; word < WORDS; word++) wrong += payload[slot][word] != generation;
        kvfs_hazard_clear(&mine, (uint32_t)place);
        __atomic_add_fetch(&torn, wrong != 0, __ATOMIC_RELAXED);
        __atomic_add_fetch(&reads, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static int is_leased(uint32_t slot, uint64_t generation) {
#ifdef BREAK_SERVICE
    (void)slot, (void)generation;
    return 0;
#else
    for (unsigned reader = 0; reader < READERS; reader++)
        if (kvfs_hazards_name(&hazards[reader], slot, generation)) return 1;
    return 0;
#endif
}

static void seal(uint32_t slot, uint64_t generation) {
    for (unsigned word = 0; word < WORDS; word++) payload[slot][word] = generation;
    kvfs_generation_set(&generations, slot, generation);
}

int main(int argc, char **argv) {
    pthread_t threads[READERS];
    uint64_t held = 0, dying[SLOTS] = {0};
    const long rounds = argc > 1 ? atol(argv[1]) : 1000;
    if (kvfs_words_make(&generations, SLOTS, 1) < 0) return 1;
    for (unsigned reader = 0; reader < READERS; reader++) {
        struct kvfs_words made;
        const int fd = kvfs_words_make(&made, PLACES, 0);
        if (fd < 0 || kvfs_words_map(&hazards[reader], fd, 1) < 0) return 1;
        pthread_create(&threads[reader], NULL, read_slots, &hazards[reader]);
    }
    for (long round = 0; round < rounds && !__atomic_load_n(&torn, __ATOMIC_RELAXED); round++) {
        const uint32_t slot = (uint32_t)round % SLOTS;
        const uint64_t generation = kvfs_generation_get(&generations, slot);
        if (!(generation & 1)) {
            dying[slot] = generation;
            kvfs_generation_set(&generations, slot, generation + 1);
        }
        if (dying[slot] && is_leased(slot, dying[slot])) {
            held++;
            sched_yield();
        } else
            seal(slot, (generation | 1) + 1);
    }
    __atomic_store_n(&stopped, 1, __ATOMIC_RELAXED);
    for (unsigned reader = 0; reader < READERS; reader++) pthread_join(threads[reader], NULL);
    printf(torn ? "torn\n" : "done %lu %lu\n", (unsigned long)held, (unsigned long)reads);
    return torn != 0;
}

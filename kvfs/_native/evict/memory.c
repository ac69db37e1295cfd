/* Blocks that were seen, and in which turn of their prompt first, also after the cache has evicted them.
 *
 * Responsibility: fingerprints in two generations. What is used goes into the younger; when that is full it becomes the
 * older, and the one before it is dropped. So what is remembered follows from the order of uses alone, not from where hashes
 * happen to fall: between one and two generations' worth of the blocks used last.
 *
 * Invariants: at least a quarter of a generation's slots are empty, so each row of neighbours ends.
 */
#include "policy_state.h"

#define MIN_ROOM 2048
#define UNITS_PER_BLOCK \
    1 /* a generation has room for a third as many blocks as the cache has units, one in four being added */

int kvfs_memory_init(struct memory *m) {
    memset(m, 0, sizeof *m);
    m->now = (struct generation){calloc(MIN_ROOM, sizeof(uint32_t)), MIN_ROOM, 0};
    return m->now.slots ? 0 : -ENOMEM;
}

void kvfs_memory_free(struct memory *m) {
    free(m->now.slots);
    free(m->before.slots);
}

uint64_t kvfs_memory_bytes(const struct memory *m) {
    return ((uint64_t)m->now.room + m->before.room) * sizeof *m->now.slots;
}

/* The slot of a block, or the empty one where it would be; NULL in a generation that there is not. */
static uint32_t *slot_of(const struct generation *g, uint64_t hash) {
    if (!g->slots) return NULL;
    uint32_t i = (uint32_t)((hash & UINT32_MAX) * g->room >> 32), fingerprint = (uint32_t)(hash >> 40) << 8;
    while (g->slots[i] && (g->slots[i] & ~0xffu) != fingerprint) i = i + 1 == g->room ? 0 : i + 1;
    return &g->slots[i];
}

/* Returns the turn in which a block was first seen; 0 for one that is not remembered. */
uint8_t kvfs_memory_turn(const struct memory *m, uint64_t hash) {
    const uint32_t *now = slot_of(&m->now, hash), *before = slot_of(&m->before, hash);
    return (uint8_t)(*now ? *now : before ? *before : 0);
}

static void start_generation(struct memory *m) {
    uint32_t room = m->units / UNITS_PER_BLOCK / 3 * 4;
    room = room > MIN_ROOM ? room : MIN_ROOM;
    uint32_t *slots = calloc(room, sizeof *slots);
    if (!slots) { /* without memory the younger generation starts over, and the older stays */
        memset(m->now.slots, 0, m->now.room * sizeof *m->now.slots);
        m->now.filled = 0;
        return;
    }
    free(m->before.slots);
    m->before = m->now;
    m->now = (struct generation){slots, room, 0};
}

/* Remember a block as used now. */
void kvfs_memory_add(struct memory *m, uint64_t hash, uint8_t turn) {
    uint32_t *slot = slot_of(&m->now, hash);
    if (!*slot) {
        if (4ull * (m->now.filled + 1) > 3ull * m->now.room) {
            start_generation(m);
            slot = slot_of(&m->now, hash);
        }
        m->now.filled++;
    }
    *slot = (uint32_t)(hash >> 40) << 8 | turn;
}

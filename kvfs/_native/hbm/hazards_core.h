/* Leases of memory that the kernel cannot guard. See hazards_core.c. */
#ifndef KVFS_HAZARDS_CORE_H
#define KVFS_HAZARDS_CORE_H

#include <stddef.h>
#include <stdint.h>

/* A hazard: the slot above, its generation below; 0 is none, as generations of sealed slots begin at 2. */
#define KVFS_HAZARD_GENERATION_BITS 44
#define KVFS_HAZARD_MAX_SLOTS (1u << 20)

/* An array of words in a memory file of fixed size, mapped. */
struct kvfs_words {
    uint64_t *at;
    uint32_t count;
};

/* All return -errno. */
int kvfs_words_make(struct kvfs_words *words, uint32_t count, int one_writer);
int kvfs_words_map(struct kvfs_words *words, int fd, int writable);
void kvfs_words_unmap(struct kvfs_words *words);

uint64_t kvfs_generation_get(const struct kvfs_words *generations, uint32_t slot);
void kvfs_generation_set(const struct kvfs_words *generations, uint32_t slot, uint64_t generation);
int64_t kvfs_hazard_publish(const struct kvfs_words *hazards, const struct kvfs_words *generations, uint32_t slot,
                            uint64_t generation);
int kvfs_hazard_clear(const struct kvfs_words *hazards, uint32_t place);
int kvfs_hazards_name(const struct kvfs_words *hazards, uint32_t slot, uint64_t generation);

#endif

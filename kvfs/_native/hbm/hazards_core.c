/* Leases of memory that the kernel cannot guard: hazards that clients publish, generations that the service moves.
 *
 * Responsibility: the two shared arrays, and the order of the accesses to them. A generation is even while its slot is
 * sealed; the service alone writes it. A client names (slot, generation) in its own array of hazards while it copies.
 *
 * Invariants:
 * - publish stores the hazard and then loads the generation; the service stores a new generation and then loads all
 *   hazards. All four are sequentially consistent, so of any two that meet at least one sees the other: either the
 *   client finds another generation and copies nothing, or the service finds the hazard and does not reuse the slot.
 * - a hazard is cleared by a release store and looked at by an acquire load (sequential consistency has both): what was
 *   copied before the clear is copied before the reuse. A client clears it once its device has completed the copy.
 * - a generation is set by a release store: who finds it even sees what was written before the seal, as far as memory of
 *   the host goes; a device's writes are complete before the client asks for the seal.
 * - no file shrinks (F_SEAL_SHRINK), so no peer can take pages from under a mapping; nobody but the maker of a file with
 *   one writer can write it (F_SEAL_FUTURE_WRITE). What a client writes to its own array costs only itself: its leases,
 *   or slots that stay held while it lives.
 *
 * Concurrency: any thread of any process; set is the service's thread's. Nothing waits.
 */
#include "hbm/hazards_core.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t GENERATION_MASK = (1ull << KVFS_HAZARD_GENERATION_BITS) - 1;

static uint64_t pack(uint32_t slot, uint64_t generation) {
    return (uint64_t)slot << KVFS_HAZARD_GENERATION_BITS | (generation & GENERATION_MASK);
}

static int map(struct kvfs_words *words, int fd, uint32_t count, int protection) {
    void *at = mmap(NULL, (size_t)count * sizeof *words->at, protection, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return -errno;
    *words = (struct kvfs_words){.at = at, .count = count};
    return 0;
}

/* Makes a file of zeros and maps it; with `one_writer`, writable by this mapping alone. The descriptor, or -errno. */
int kvfs_words_make(struct kvfs_words *words, uint32_t count, int one_writer) {
    const int fd = memfd_create("kvfs-hbm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -errno;
    int rc = ftruncate(fd, (off_t)count * (off_t)sizeof *words->at) < 0 ? -errno : 0;
    if (rc == 0) rc = map(words, fd, count, one_writer ? PROT_READ | PROT_WRITE : PROT_READ);
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (one_writer ? F_SEAL_FUTURE_WRITE : 0);
    if (rc == 0 && fcntl(fd, F_ADD_SEALS, seals) < 0) {
        rc = -errno;
        kvfs_words_unmap(words);
    }
    if (rc < 0) close(fd);
    return rc < 0 ? rc : fd;
}

/* Maps a file that kvfs_words_make made. -EINVAL for one that could shrink. */
int kvfs_words_map(struct kvfs_words *words, int fd, int writable) {
    struct stat stat;
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || fstat(fd, &stat) < 0) return -errno;
    const uint64_t count = (uint64_t)stat.st_size / sizeof *words->at;
    if (!(seals & F_SEAL_SHRINK) || count == 0 || count > KVFS_HAZARD_MAX_SLOTS) return -EINVAL;
    return map(words, fd, (uint32_t)count, writable ? PROT_READ | PROT_WRITE : PROT_READ);
}

void kvfs_words_unmap(struct kvfs_words *words) {
    if (words->at) munmap(words->at, (size_t)words->count * sizeof *words->at);
    *words = (struct kvfs_words){0};
}

uint64_t kvfs_generation_get(const struct kvfs_words *generations, uint32_t slot) {
    return slot < generations->count ? __atomic_load_n(&generations->at[slot], __ATOMIC_SEQ_CST) : 0;
}

void kvfs_generation_set(const struct kvfs_words *generations, uint32_t slot, uint64_t generation) {
    __atomic_store_n(&generations->at[slot], generation, __ATOMIC_SEQ_CST);
}

/* Takes a free place. 0, or -EAGAIN. Where to begin is drawn from the hazard, so that threads seldom meet. */
static int64_t take(const struct kvfs_words *hazards, uint64_t hazard) {
    const uint32_t first = (uint32_t)(hazard >> KVFS_HAZARD_GENERATION_BITS);
    for (uint32_t i = 0; i < hazards->count; i++) {
        const uint32_t place = (first + i) % hazards->count;
        uint64_t none = 0;
        if (__atomic_load_n(&hazards->at[place], __ATOMIC_RELAXED) == 0 &&
            __atomic_compare_exchange_n(&hazards->at[place], &none, hazard, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
            return place;
    }
    return -EAGAIN;
}

/* Leases a sealed slot. The place of its hazard; -ESTALE where the slot has another generation, -EAGAIN where all places
 * are taken. */
int64_t kvfs_hazard_publish(const struct kvfs_words *hazards, const struct kvfs_words *generations, uint32_t slot,
                            uint64_t generation) {
    if (slot >= generations->count || generation == 0 || generation & 1 || generation > GENERATION_MASK) return -ESTALE;
    const int64_t place = take(hazards, pack(slot, generation));
    if (place >= 0 && kvfs_generation_get(generations, slot) != generation) {
        kvfs_hazard_clear(hazards, (uint32_t)place);
        return -ESTALE;
    }
    return place;
}

/* Ends a lease, once nothing copies from the slot any more. -EINVAL for a place that names none. */
int kvfs_hazard_clear(const struct kvfs_words *hazards, uint32_t place) {
    if (place >= hazards->count || __atomic_load_n(&hazards->at[place], __ATOMIC_RELAXED) == 0) return -EINVAL;
    __atomic_store_n(&hazards->at[place], 0, __ATOMIC_RELEASE);
    return 0;
}

/* Whether a client has this slot and generation leased; asked after the generation was moved. */
int kvfs_hazards_name(const struct kvfs_words *hazards, uint32_t slot, uint64_t generation) {
    const uint64_t hazard = pack(slot, generation);
    for (uint32_t place = 0; place < hazards->count; place++)
        if (__atomic_load_n(&hazards->at[place], __ATOMIC_SEQ_CST) == hazard) return 1;
    return 0;
}

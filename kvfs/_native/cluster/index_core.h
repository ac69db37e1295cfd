/* Which sources of a cluster hold which blocks. See index_core.c. */
#ifndef KVFS_CLUSTER_INDEX_CORE_H
#define KVFS_CLUSTER_INDEX_CORE_H

#include <stddef.h>
#include <stdint.h>

#include "cluster/holder_sets.h"

#define KVFS_CLUSTER_HASH_BYTES 16
#define KVFS_CLUSTER_SOURCES 1024
#define KVFS_CLUSTER_MASK_WORDS (KVFS_CLUSTER_SOURCES / 64)

struct kvfs_cluster;

/* Consecutive blocks that the same sources hold: bit s of `holders` for source s. */
struct kvfs_run {
    uint64_t holders[KVFS_CLUSTER_MASK_WORDS];
    uint64_t blocks;
    int64_t producer;
};

/* Zeros at first; `at` is the caller's to free. */
struct kvfs_runs {
    struct kvfs_run *at;
    size_t count;
    uint32_t room;
};

struct kvfs_depth {
    uint32_t source, blocks;
};

#define KVFS_WINDOWS_OF_SOURCE 8u
#define KVFS_WINDOW_STRIDE 4096u

/* Blocks beside those of `source`, each as long as `stride` of these, KVFS_WINDOW_STRIDE at most, and by the hash of the
 * last: a prompt goes on from a boundary only where one of them ends and `holder` has the last `blocks` before it, or with
 * chunks, of `blocks` each, those since the last chunk ended. `other` may have in place of `source` what this lacks of the
 * prompt; none but itself is `source`. `is_alone`, the same of all windows of a source: nothing is read of its own blocks,
 * and each counts as there. */
struct kvfs_window {
    uint32_t source, holder, blocks, stride, other, is_chunked, is_alone;
};

struct kvfs_cluster *kvfs_cluster_new(uint64_t max_blocks, uint64_t seed);
void kvfs_cluster_free(struct kvfs_cluster *c);

/* How many blocks there was no room for, or how many of those to be removed the source held. */
int64_t kvfs_cluster_change(struct kvfs_cluster *c, enum kvfs_set_change change, uint32_t source,
                            struct kvfs_producer producer, const uint8_t *hashes, size_t count);
void kvfs_cluster_clear(struct kvfs_cluster *c, uint32_t source);
void kvfs_cluster_sweep(struct kvfs_cluster *c, uint64_t segments);
int kvfs_cluster_is_swept(const struct kvfs_cluster *c);
/* How many sources were cleared whose blocks are not swept yet. */
uint32_t kvfs_cluster_unswept(const struct kvfs_cluster *c);

/* From here on a source counts as far as its windows go on, KVFS_WINDOWS_OF_SOURCE at most: 0 or -ENOMEM. */
int kvfs_cluster_set_windows(struct kvfs_cluster *c, uint32_t source, const struct kvfs_window *windows, size_t count);

/* The longest prefix of which each block is held, or counts as there, in runs: 0 or -ENOMEM. */
int kvfs_cluster_runs(const struct kvfs_cluster *c, const uint8_t *hashes, size_t count, struct kvfs_runs *runs);
/* Writes how far each source gets that has the first block: how many sources, or -ENOMEM. */
int64_t kvfs_cluster_match(const struct kvfs_cluster *c, const uint8_t *hashes, size_t count,
                           struct kvfs_depth depths[KVFS_CLUSTER_SOURCES]);
/* Writes how far the sources of each mask get together; the caller wants `depths` to be zeros. 0 or -ENOMEM. */
int kvfs_cluster_depths(const struct kvfs_cluster *c, const uint8_t *hashes, size_t count, const uint64_t *masks,
                        size_t mask_count, uint64_t *depths);
/* The same, wherever their windows go on. */
void kvfs_cluster_present(const struct kvfs_cluster *c, const uint8_t *hashes, size_t count, const uint64_t *masks,
                          size_t mask_count, uint64_t *depths);
int kvfs_cluster_holds(const struct kvfs_cluster *c, uint32_t source, const uint8_t *hash);
void kvfs_cluster_holders(const struct kvfs_cluster *c, const uint8_t *hash, uint64_t holders[KVFS_CLUSTER_MASK_WORDS]);
/* Writes those that no source of a mask holds: how many. */
size_t kvfs_cluster_lacking(const struct kvfs_cluster *c, const uint8_t *hashes, size_t count,
                            const uint64_t mask[KVFS_CLUSTER_MASK_WORDS], uint8_t *lacking);

#define KVFS_CLUSTER_SEGMENT_BLOCKS 3069
/* Writes the hashes of one segment that a source holds: their count. `cursor` is 0 at first, and at the end again. */
size_t kvfs_cluster_list(const struct kvfs_cluster *c, uint32_t source, uint64_t *cursor, uint8_t *hashes);

uint64_t kvfs_cluster_count(const struct kvfs_cluster *c);
uint64_t kvfs_cluster_source_blocks(const struct kvfs_cluster *c, uint32_t source);
uint64_t kvfs_cluster_bytes(const struct kvfs_cluster *c);

#endif

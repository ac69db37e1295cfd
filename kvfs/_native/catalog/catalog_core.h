/* The blocks of a store by prefix hash, by object id, by bucket and by parent. See catalog_core.c. */
#ifndef KVFS_CATALOG_CORE_H
#define KVFS_CATALOG_CORE_H

#include <stdint.h>

#define KVFS_BLOCK_NONE UINT32_MAX
#define KVFS_BLOCK_KEY_BYTES 16

struct kvfs_catalog;

/* What is known of a block. `has_parent`: else `parent` means nothing. */
struct kvfs_block {
    uint8_t key[KVFS_BLOCK_KEY_BYTES];
    uint8_t parent[KVFS_BLOCK_KEY_BYTES];
    uint64_t sequence;
    uint64_t size_bytes;
    int64_t sealed_ns;
    uint32_t uid;
    uint32_t bucket;
    uint8_t has_parent;
    uint8_t pinned;
};

struct kvfs_catalog *kvfs_catalog_new(uint64_t seed);
void kvfs_catalog_free(struct kvfs_catalog *c);

/* Adds a block in the place of an equal one: 0, -ENOMEM, or -EINVAL for a bucket that was not opened. */
int kvfs_catalog_add(struct kvfs_catalog *c, const struct kvfs_block *block);
/* 1 and the block as it was, or 0. */
int kvfs_catalog_remove(struct kvfs_catalog *c, const uint8_t *key, struct kvfs_block *removed);
int kvfs_catalog_get(const struct kvfs_catalog *c, const uint8_t *key, struct kvfs_block *found);
int kvfs_catalog_pin(struct kvfs_catalog *c, const uint8_t *key, int pinned);
/* 1 and the key of the block with this id, or 0. */
int kvfs_catalog_of_sequence(const struct kvfs_catalog *c, uint64_t sequence, uint8_t *key);

uint32_t kvfs_catalog_count(const struct kvfs_catalog *c);
uint64_t kvfs_catalog_state_bytes(const struct kvfs_catalog *c);

/* The number of a new bucket, or -ENOMEM; its number is free again after `close`, which wants it empty. */
int64_t kvfs_catalog_open_bucket(struct kvfs_catalog *c);
void kvfs_catalog_close_bucket(struct kvfs_catalog *c, uint32_t bucket);
uint64_t kvfs_catalog_bucket_blocks(const struct kvfs_catalog *c, uint32_t bucket);
uint64_t kvfs_catalog_bucket_bytes(const struct kvfs_catalog *c, uint32_t bucket);
uint32_t kvfs_catalog_shelf_blocks(const struct kvfs_catalog *c, uint32_t bucket, uint8_t first);
/* Writes the keys of a bucket that begin with this byte, in order; room for all of them is the caller's. */
void kvfs_catalog_shelf(const struct kvfs_catalog *c, uint32_t bucket, uint8_t first, uint8_t *keys);

/* Writes all keys in the order of their seals: 0, or -ENOMEM. */
int kvfs_catalog_keys(const struct kvfs_catalog *c, uint8_t *keys);
/* The keys of the blocks behind this one, parents first, in memory that the caller frees: their count, or -ENOMEM. */
int64_t kvfs_catalog_descendants(const struct kvfs_catalog *c, const uint8_t *key, uint8_t **keys);
/* How many blocks name this one as their parent, itself not counted. */
uint32_t kvfs_catalog_children(const struct kvfs_catalog *c, const uint8_t *key);

#endif

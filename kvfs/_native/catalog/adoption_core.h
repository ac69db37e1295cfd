/* What a start takes over: the sealed slots of an earlier service's table. See adoption_core.c. */
#ifndef KVFS_ADOPTION_CORE_H
#define KVFS_ADOPTION_CORE_H

#include <stdint.h>

#include "shared/formats.h"
#include "shared/slots_core.h"

#define KVFS_NO_SURVIVOR UINT32_MAX

enum kvfs_survivor_flag {
    KVFS_SURVIVOR_WHOLE = 1,  /* its file is there, of the right size, and nobody can write it */
    KVFS_SURVIVOR_WANTED = 2, /* chosen by what names and buckets say, and kept so far */
    KVFS_SURVIVOR_PINNED = 4,
    KVFS_SURVIVOR_LATER = 8, /* its file is looked at and hashed once the store serves */
    KVFS_SURVIVOR_BAD = 16,
    KVFS_SURVIVOR_PLACED = 32, /* while the order is made */
    KVFS_SURVIVOR_IN_CHAIN = 64,
};

struct kvfs_survivor {
    struct kvfs_slot_header header;
    uint32_t slot, hits, last_access_s;
    uint32_t blocks; /* of 512 bytes, that its file takes */
    uint32_t unit;   /* of files that are useful only together; 0: none */
    uint32_t next;   /* in its unit, or in its chain of keys */
    uint32_t flags;
};

struct kvfs_adoption {
    struct kvfs_survivor *survivors;
    uint32_t count, room;
    uint32_t *generations, *by_slot; /* of each slot that the old table used */
    uint32_t used;
    uint32_t *damaged, damaged_count; /* slots whose headers are */
    uint32_t *by_key, key_mask;       /* first survivor of each hash, linked by `next` */
    uint32_t *order, ordered;         /* survivors in the order of their worth, the dearest first */
    uint8_t *files;                   /* a bit for each slot that has a file */
    uint32_t slots;                   /* of the new table */
    uint32_t next;                    /* work that no thread has taken yet */
    int error;                        /* that ended a thread's work */
};

/* Hashes a slot: 1 where it has this size and checksum and nobody can write it, 0 where not, or -errno for a shortage.
 * `has_writer` is kvfs_fd_has_writer. */
typedef int kvfs_probe_fd(int fd);
int kvfs_slot_matches(int dirfd, uint32_t slot, uint64_t size_bytes, uint64_t checksum, kvfs_probe_fd *has_writer,
                      uint8_t *chunk);

/* All return 0, or -errno. */
int kvfs_adoption_init(struct kvfs_adoption *a, uint32_t slots);
void kvfs_adoption_free(struct kvfs_adoption *a);
int kvfs_adoption_read(struct kvfs_adoption *a, int fd, const struct kvfs_table_header *head);
void kvfs_adoption_note_file(struct kvfs_adoption *a, uint32_t slot);
int kvfs_adoption_has_file(const struct kvfs_adoption *a, uint32_t slot);

/* Any number of threads call one of these at a time, each until all is done; `next` is 0 before. */
typedef int kvfs_check_slot(int dirfd, uint32_t slot, struct kvfs_slot_stat *out); /* kvfs_slot_check_no_writer */
int kvfs_adoption_check_files(struct kvfs_adoption *a, int dirfd, kvfs_check_slot *check, uint64_t later_bytes);
int kvfs_adoption_verify(struct kvfs_adoption *a, int dirfd, kvfs_probe_fd *has_writer);

int kvfs_adoption_keep_whole(struct kvfs_adoption *a);
/* The survivor with this key that is whole, after kvfs_adoption_keep_whole; KVFS_NO_SURVIVOR: none. */
uint32_t kvfs_adoption_find(const struct kvfs_adoption *a, const uint8_t *key);
int kvfs_adoption_sort(struct kvfs_adoption *a);
uint32_t kvfs_adoption_fit(struct kvfs_adoption *a, int64_t room_bytes); /* how many do not */
void kvfs_adoption_drop_bad(struct kvfs_adoption *a);
int kvfs_adoption_keeps(const struct kvfs_adoption *a, uint32_t slot);
/* The next slot from `from` on whose file is of nothing that is kept, which is noted no more; UINT32_MAX: none. */
uint32_t kvfs_adoption_take_unkept(struct kvfs_adoption *a, uint32_t from);

#endif

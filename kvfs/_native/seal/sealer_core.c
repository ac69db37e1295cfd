/* Sealing blocks without the event loop: a thread for each seal channel of a session.
 *
 * Responsibility: a packet of block seals in, a packet of results out. For each seal: is the draft this session's,
 * does nobody write it any more, is the block new? Then its header and its table entry, which makes it visible. What
 * the store keeps besides (books, policy, journal) the event loop does afterwards, from the ring.
 *
 * Invariants:
 * - A block that is in the table is never replaced here; the event loop, before it puts a block into the table, holds
 *   `lock` from the moment it looked. So the first seal wins, whoever answers it.
 * - Every draft that is sealed or returned here is in the ring until the event loop takes it. Where there is no
 *   room, no id, or anything out of the ordinary, the answer is EAGAIN and the session asks the event loop.
 * - A peer cannot hold anybody up: packets are bounded, and the channel of one that does not take its answer is closed.
 *
 * Concurrency: `lock` is held while one packet is served (some 5 us a seal) and by the event loop for its own steps;
 * `table->lock` is taken inside of it. Channels are opened and closed by the event loop alone.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "sealer_core.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shared/slots_core.h"

#define SLICE_NS 100000

static void notify(struct kvfs_sealer *s) {
    const uint64_t one = 1;
    (void)!write(s->notify_fd, &one, sizeof one);
}

/* Size and blocks of a slot that nobody can write any more; -EBUSY while a writer lives. Its descriptor, and the lease
 * with it, is closed after the answer is sent, by the caller. */
static int look_at(struct kvfs_sealer *s, uint32_t slot, struct stat *found, int *fd) {
    *fd = kvfs_slot_open(s->dirfd, slot, O_RDONLY | O_NONBLOCK);
    if (*fd < 0) return -EAGAIN;
    if (fcntl(*fd, F_SETLEASE, F_RDLCK) != 0) return errno == EAGAIN ? -EBUSY : -EAGAIN;
    return fstat(*fd, found) == 0 ? 0 : -EAGAIN;
}

static void note(struct kvfs_sealer *s, const struct kvfs_sealed *done) REQUIRES(s->lock) {
    s->ring[(s->head + s->count) % s->ring_room] = *done;
    __atomic_store_n(&s->count, s->count + 1, __ATOMIC_RELEASE);
    s->grants[done->slot] = (struct kvfs_grant){0};
}

/* Header first, entry second: a reader that finds the entry finds the slot sealed. */
static int publish(struct kvfs_sealer *s, const struct kvfs_seal_channel *channel, const struct kvfs_seal_request *seal,
                   struct kvfs_sealed *done) {
    struct kvfs_slot_header header = {
        .kind = KVFS_KIND_BLOCK, .object_id = done->object_id, .sequence = done->object_id};
    struct kvfs_entry_value value = {.slot = seal->slot,
                                     .generation = seal->generation + 1,
                                     .size_bytes = done->size_bytes,
                                     .kind = KVFS_KIND_BLOCK,
                                     .tiers = KVFS_TIER_DRAM};
    memcpy(header.key, seal->key, KVFS_KEY_BYTES);
    memcpy(header.parent, seal->parent, KVFS_KEY_BYTES);
    header.size_bytes = done->size_bytes;
    header.uid = channel->uid;
    header.bucket_id = channel->bucket_id;
    header.sealed_at_ns = done->sealed_at_ns;
    if (done->has_checksum) {
        header.checksum = seal->checksum;
        header.marks = KVFS_MARK_HAS_CHECKSUM;
    }
    int rc = s->writer.publish(s->table, seal->slot, seal->generation, &header);
    if (rc < 0) return -EAGAIN;
    if (s->writer.put(s->table, seal->key, &value) < 0) done->outcome = KVFS_SEAL_UNINDEXED;
    return done->outcome == KVFS_SEAL_UNINDEXED ? -ENOSPC : 0;
}

/* One seal: 0, or -errno. */
static int seal_one(struct kvfs_sealer *s, const struct kvfs_seal_channel *channel,
                    const struct kvfs_seal_request *seal, uint64_t *size_bytes, int *fd) REQUIRES(s->lock) {
    static const uint64_t no_key = 0;
    struct kvfs_entry_view view;
    struct stat found;
    if (seal->slot >= s->table->slot_count || s->grants[seal->slot].channel != channel->number + 1 ||
        s->grants[seal->slot].generation != seal->generation)
        return -ESTALE;
    if ((seal->flags & ~KVFS_SEAL_HAS_CHECKSUM) || memcmp(seal->key, &no_key, sizeof no_key) == 0) return -EINVAL;
    if (s->count == s->ring_room || s->next_id == s->end_id) return -EAGAIN;
    struct kvfs_sealed done = {.slot = seal->slot, .generation = seal->generation, .channel = channel->number};
    memcpy(done.key, seal->key, KVFS_KEY_BYTES);
    memcpy(done.parent, seal->parent, KVFS_KEY_BYTES);
    int there = kvfs_table_lookup(s->table, seal->key, &view);
    if (there < 0) return -EAGAIN;
    if (there) {
        *size_bytes = view.size_bytes;
        done.outcome = KVFS_SEAL_THERE;
        note(s, &done);
        return -EEXIST;
    }
    int rc = look_at(s, seal->slot, &found, fd);
    if (rc < 0) return rc;
    if ((uint64_t)found.st_size > s->largest_bytes) return -EFBIG;
    if ((uint64_t)found.st_blocks * 512u < (uint64_t)found.st_size)
        return -EAGAIN; /* it has holes, which the event loop fills first */
    done.object_id = s->next_id++;
    done.size_bytes = *size_bytes = (uint64_t)found.st_size;
    done.physical_bytes = (uint64_t)found.st_blocks * 512u;
    done.sealed_at_ns = kvfs_clock_ns(CLOCK_REALTIME);
    done.has_checksum = seal->flags & KVFS_SEAL_HAS_CHECKSUM;
    rc = publish(s, channel, seal, &done);
    if (rc != -EAGAIN) note(s, &done);
    return rc;
}

/* One packet of `n` seals, answered. 0, or -1 when the answer was not taken. */
static int serve(struct kvfs_sealer *s, const struct kvfs_seal_channel *channel, const struct kvfs_seal_request *seals,
                 size_t n) {
    struct kvfs_seal_result results[KVFS_SEALS_AT_ONCE];
    int looked[KVFS_SEALS_AT_ONCE];
    memset(results, 0, sizeof results);
    kvfs_lock(&s->lock);
    uint32_t before = s->count;
    for (size_t i = 0; i < n; i++) {
        looked[i] = -1;
        results[i].status = -seal_one(s, channel, &seals[i], &results[i].size_bytes, &looked[i]);
    }
    int news = before == 0 && s->count;
    kvfs_unlock(&s->lock);
    ssize_t sent = send(channel->fd, results, n * sizeof *results, MSG_DONTWAIT | MSG_NOSIGNAL);
    for (size_t i = 0; i < n; i++)
        if (looked[i] >= 0) close(looked[i]);
    if (news) /* after the answer, since the writer waits for that */
        notify(s);
    return sent < 0 ? -1 : 0;
}

/* A short slice has a thread run soon after it wakes (Linux 6.12; others refuse it), and this one only ever needs some
 * microseconds: a writer waits for them, while the event loop may have the core. */
static void ask_for_short_slices(void) {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } wanted = {.size = sizeof wanted, .nice = getpriority(PRIO_PROCESS, 0), .runtime = SLICE_NS};
    (void)syscall(SYS_sched_setattr, 0, &wanted, 0);
}

/* This thread on the writer's processor, if it may run there; else wherever it may. */
static void follow(const cpu_set_t *allowed, uint32_t processor) {
    cpu_set_t there;
    CPU_ZERO(&there);
    if (processor > 0 && processor <= CPU_SETSIZE && CPU_ISSET(processor - 1, allowed)) CPU_SET(processor - 1, &there);
    (void)sched_setaffinity(0, sizeof there, CPU_COUNT(&there) ? &there : allowed);
}

/* A thread for each channel, which stays on the writer's core: the writer is about to sleep, and the round trip
 * takes 18 us. The kernel would rather wake it on a core that is idle, and where a hypervisor has halted that, the
 * round trip takes 55 us; spinning for the answer left it at 32, and waking the thread ahead of its packet cost as much
 * as it gained. */
static void *thread_main(void *argument) {
    struct kvfs_seal_channel *channel = (struct kvfs_seal_channel *)argument;
    struct kvfs_seal_request seals[KVFS_SEALS_AT_ONCE];
    cpu_set_t allowed;
    uint32_t processor = 0;
    const int may_follow = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
    ask_for_short_slices();
    for (;;) {
        ssize_t got = recv(channel->fd, seals, sizeof seals, MSG_TRUNC);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0 || got > (ssize_t)sizeof seals || got % (ssize_t)sizeof *seals) break;
        if (serve(channel->sealer, channel, seals, (size_t)got / sizeof *seals) < 0) break;
        if (may_follow && seals->processor != processor) follow(&allowed, processor = seals->processor);
    }
    shutdown(channel->fd, SHUT_RDWR);
    return NULL;
}

static void free_all(struct kvfs_sealer *s) UNCHECKED /* no thread any more */
{
    if (s->notify_fd >= 0) close(s->notify_fd);
    free(s->grants);
    free(s->channels);
    free(s->ring);
    kvfs_mutex_destroy(&s->lock);
}

/* `table`, `writer`, `dirfd` and `largest_bytes` are set, all else is zero. */
int kvfs_sealer_start(struct kvfs_sealer *s, uint32_t channels, uint32_t room) UNCHECKED /* no thread yet */
{
    s->channel_count = channels;
    s->ring_room = room;
    kvfs_mutex_init(&s->lock);
    s->grants = calloc(s->table->slot_count, sizeof *s->grants);
    s->channels = calloc(channels, sizeof *s->channels);
    s->ring = calloc(room, sizeof *s->ring);
    s->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = !s->grants || !s->channels || !s->ring ? -ENOMEM : s->notify_fd < 0 ? -errno : 0;
    s->started = rc == 0;
    if (rc < 0) free_all(s);
    return rc;
}

/* Ends every channel. REQUIRES that the ring was taken before: it is freed. */
void kvfs_sealer_stop(struct kvfs_sealer *s) {
    if (!s->started) return;
    s->started = 0;
    for (uint32_t i = 0; i < s->channel_count; i++) kvfs_sealer_close(s, i);
    free_all(s);
}

/* Takes over `fd`, a packet socket; the channel's number, which is its own until it is closed; or -errno. */
int64_t kvfs_sealer_open(struct kvfs_sealer *s, int fd, uint32_t uid, uint32_t bucket_id) {
    uint32_t number = 0;
    while (number < s->channel_count && s->channels[number].used) number++;
    if (number == s->channel_count) return -EMFILE;
    struct kvfs_seal_channel *channel = &s->channels[number];
    *channel = (struct kvfs_seal_channel){.sealer = s, .fd = fd, .number = number, .uid = uid, .bucket_id = bucket_id};
    int rc = kvfs_thread_start(&channel->thread, thread_main, channel, KVFS_SMALL_STACK_BYTES);
    channel->used = rc == 0;
    return rc < 0 ? (int64_t)rc : (int64_t)number;
}

/* Waits for the packet that is being served, if there is one. */
void kvfs_sealer_close(struct kvfs_sealer *s, uint32_t number) {
    struct kvfs_seal_channel *channel = &s->channels[number];
    if (number >= s->channel_count || !channel->used) return;
    shutdown(channel->fd, SHUT_RDWR);
    pthread_join(channel->thread, NULL);
    close(channel->fd);
    channel->used = 0;
}

void kvfs_sealer_grant(struct kvfs_sealer *s, uint32_t slot, uint32_t generation, uint32_t channel) {
    kvfs_lock(&s->lock);
    s->grants[slot] = (struct kvfs_grant){.generation = generation, .channel = channel + 1};
    kvfs_unlock(&s->lock);
}

/* Leaves the draft of this slot to the event loop. */
void kvfs_sealer_revoke(struct kvfs_sealer *s, uint32_t slot) {
    kvfs_lock(&s->lock);
    s->grants[slot] = (struct kvfs_grant){0};
    kvfs_unlock(&s->lock);
}

void kvfs_sealer_give_ids(struct kvfs_sealer *s, uint64_t first, uint64_t count) {
    kvfs_lock(&s->lock);
    s->next_id = first;
    s->end_id = first + count;
    kvfs_unlock(&s->lock);
}

uint64_t kvfs_sealer_ids_left(struct kvfs_sealer *s) {
    kvfs_lock(&s->lock);
    uint64_t left = s->end_id - s->next_id;
    kvfs_unlock(&s->lock);
    return left;
}

/* UNCHECKED: read without the lock, also by who holds it. What was answered as sealed before is counted, or was taken. */
uint32_t kvfs_sealer_pending(const struct kvfs_sealer *s) UNCHECKED {
    return __atomic_load_n(&s->count, __ATOMIC_ACQUIRE);
}

/* Moves at most `most` records out, oldest first; returns how many. */
uint32_t kvfs_sealer_take(struct kvfs_sealer *s, struct kvfs_sealed *into, uint32_t most) {
    uint64_t seen;
    kvfs_lock(&s->lock);
    uint32_t n = s->count < most ? s->count : most;
    for (uint32_t i = 0; i < n; i++) into[i] = s->ring[(s->head + i) % s->ring_room];
    s->head = (s->head + n) % s->ring_room;
    __atomic_store_n(&s->count, s->count - n, __ATOMIC_RELEASE);
    if (s->count == 0) (void)!read(s->notify_fd, &seen, sizeof seen);
    kvfs_unlock(&s->lock);
    return n;
}

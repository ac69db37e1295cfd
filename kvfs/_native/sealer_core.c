/* Sealing blocks without the event loop: one thread that answers the seal channels of sessions.
 *
 * Responsibility: a packet of block seals in, a packet of results out. For each seal: is the draft this session's,
 * does nobody write it any more, is the block new? Then its header and its table entry, which makes it visible. What
 * the store keeps besides (books, policy, journal) the event loop does afterwards, from the ring.
 *
 * Invariants:
 * - A block that is in the table is never replaced here; the event loop, before it puts a block into the table, holds
 *   `lock` from the moment it looked. So the first seal wins, whoever answers it.
 * - Every draft that is sealed or given back here is in the ring until the event loop takes it. Where there is no
 *   room, no id, or anything out of the ordinary, the answer is EAGAIN and the session asks the event loop.
 * - A peer cannot hold the thread up: packets are bounded, and one that does not take its answer loses its channel.
 *
 * Concurrency: `lock` is held while one packet is served (some 5 us a seal) and by the event loop for its own steps;
 * `table->lock` is taken inside of it.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "sealer_core.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "slots_core.h"

#define KIND_BLOCK 2
#define TIER_DRAM 1
#define CHANNEL_FREE (-1)
#define CHANNEL_ENDED (-2)
#define STOP_EVENT UINT64_MAX
#define SLICE_NS 100000

static void tell(struct kvfs_sealer *s)
{
    const uint64_t one = 1;
    (void)!write(s->told_fd, &one, sizeof one);
}

/* Size and blocks of a slot that nobody can write any more; -EBUSY while a writer lives. Its descriptor, and the lease
 * with it, is closed after the answer is sent, by the caller. */
static int look_at(struct kvfs_sealer *s, uint32_t slot, struct stat *found, int *fd)
{
    char name[KVFS_SLOT_NAME_BYTES];
    kvfs_slot_name(slot, name);
    *fd = openat(s->dirfd, name, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    if (*fd < 0)
        return -EAGAIN;
    if (fcntl(*fd, F_SETLEASE, F_RDLCK) != 0)
        return errno == EAGAIN ? -EBUSY : -EAGAIN;
    return fstat(*fd, found) == 0 ? 0 : -EAGAIN;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static void note(struct kvfs_sealer *s, const struct kvfs_sealed *done)
{
    s->ring[(s->head + s->count++) % s->ring_room] = *done;
    s->grants[done->slot] = (struct kvfs_grant){0};
}

/* Header first, entry second: a reader that finds the entry finds the slot sealed. */
static int publish(struct kvfs_sealer *s, const struct kvfs_seal_channel *channel, const struct kvfs_seal_request *seal,
                   struct kvfs_sealed *done)
{
    struct kvfs_slot_header header = {.kind = KIND_BLOCK, .object_id = done->object_id, .sequence = done->object_id};
    struct kvfs_entry_value value = {.slot = seal->slot, .generation = seal->generation + 1,
                                     .size_bytes = done->size_bytes, .kind = KIND_BLOCK, .tiers = TIER_DRAM};
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
    if (rc < 0)
        return -EAGAIN;
    if (s->writer.put(s->table, seal->key, &value) < 0)
        done->outcome = KVFS_SEAL_UNINDEXED;
    return done->outcome == KVFS_SEAL_UNINDEXED ? -ENOSPC : 0;
}

/* One seal: 0, or -errno. REQUIRES lock. */
static int seal_one(struct kvfs_sealer *s, uint32_t number, const struct kvfs_seal_request *seal, uint64_t *size_bytes,
                    int *fd)
{
    struct kvfs_entry_view view;
    struct stat found;
    if (seal->slot >= s->table->slot_count || s->grants[seal->slot].channel != number + 1 ||
        s->grants[seal->slot].generation != seal->generation)
        return -ESTALE;
    if ((seal->flags & ~KVFS_SEAL_HAS_CHECKSUM) || seal->reserved || memcmp(seal->key, &(uint64_t){0}, 8) == 0)
        return -EINVAL;
    if (s->count == s->ring_room || s->next_id == s->end_id)
        return -EAGAIN;
    struct kvfs_sealed done = {.slot = seal->slot, .generation = seal->generation, .channel = number};
    memcpy(done.key, seal->key, KVFS_KEY_BYTES);
    memcpy(done.parent, seal->parent, KVFS_KEY_BYTES);
    int there = kvfs_table_lookup(s->table, seal->key, &view);
    if (there < 0)
        return -EAGAIN;
    if (there) {
        *size_bytes = view.size_bytes;
        done.outcome = KVFS_SEAL_THERE;
        note(s, &done);
        return -EEXIST;
    }
    int rc = look_at(s, seal->slot, &found, fd);
    if (rc < 0)
        return rc;
    if ((uint64_t)found.st_size > s->largest_bytes)
        return -EFBIG;
    done.object_id = s->next_id++;
    done.size_bytes = *size_bytes = (uint64_t)found.st_size;
    done.physical_bytes = (uint64_t)found.st_blocks * 512u;
    done.sealed_at_ns = now_ns();
    done.has_checksum = seal->flags & KVFS_SEAL_HAS_CHECKSUM;
    rc = publish(s, &s->channels[number], seal, &done);
    if (rc != -EAGAIN)
        note(s, &done);
    return rc;
}

/* `left` is CHANNEL_FREE, or CHANNEL_ENDED while the event loop still knows the channel by this number. REQUIRES lock. */
static void drop_channel(struct kvfs_sealer *s, uint32_t number, int left)
{
    if (s->channels[number].fd >= 0)
        close(s->channels[number].fd); /* which takes it out of the poll set, too */
    s->channels[number].fd = left;
}

/* One packet of a channel. REQUIRES lock. */
static void serve(struct kvfs_sealer *s, uint32_t number)
{
    struct kvfs_seal_request seals[KVFS_SEALS_AT_ONCE];
    struct kvfs_seal_result results[KVFS_SEALS_AT_ONCE];
    int looked[KVFS_SEALS_AT_ONCE];
    int fd = s->channels[number].fd;
    ssize_t got = fd < 0 ? -1 : recv(fd, seals, sizeof seals, MSG_DONTWAIT | MSG_TRUNC);
    if (fd < 0 || (got < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    if (got <= 0 || got > (ssize_t)sizeof seals || got % (ssize_t)sizeof *seals) {
        drop_channel(s, number, CHANNEL_ENDED);
        return;
    }
    size_t n = (size_t)got / sizeof *seals;
    uint32_t before = s->count;
    memset(results, 0, sizeof results);
    for (size_t i = 0; i < n; i++) {
        looked[i] = -1;
        int rc = seal_one(s, number, &seals[i], &results[i].size_bytes, &looked[i]);
        results[i].status = -rc;
        *(rc == 0 ? &s->sealed : &s->refused) += 1;
    }
    if (send(fd, results, n * sizeof *results, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        drop_channel(s, number, CHANNEL_ENDED);
    for (size_t i = 0; i < n; i++)
        if (looked[i] >= 0)
            close(looked[i]);
    if (before == 0 && s->count) /* after the answer: the event loop is in no hurry */
        tell(s);
}

/* A short slice has a thread run soon after it wakes (Linux 6.12; others refuse it), and this one only ever needs some
 * microseconds: a writer waits for them, while the event loop may have the core. */
static void ask_for_short_slices(void)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } wanted = {.size = sizeof wanted, .nice = getpriority(PRIO_PROCESS, 0), .runtime = SLICE_NS};
    (void)syscall(SYS_sched_setattr, 0, &wanted, 0);
}

static void *thread_main(void *argument)
{
    struct kvfs_sealer *s = argument;
    ask_for_short_slices();
    struct epoll_event events[16];
    for (;;) {
        int n = epoll_wait(s->poll_fd, events, 16, -1);
        if (n < 0 && errno != EINTR)
            return NULL;
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == STOP_EVENT)
                return NULL;
            pthread_mutex_lock(&s->lock);
            serve(s, (uint32_t)events[i].data.u64);
            pthread_mutex_unlock(&s->lock);
        }
    }
}

/* Signals stay with the application's threads. */
static int spawn(struct kvfs_sealer *s)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int rc = pthread_create(&s->thread, NULL, thread_main, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -rc;
}

static int make(struct kvfs_sealer *s, uint32_t channels, uint32_t room)
{
    struct epoll_event stop = {.events = EPOLLIN, .data.u64 = STOP_EVENT};
    s->grants = calloc(s->table->slot_count, sizeof *s->grants);
    s->channels = calloc(channels, sizeof *s->channels);
    s->ring = calloc(room, sizeof *s->ring);
    if (!s->grants || !s->channels || !s->ring)
        return -ENOMEM;
    for (uint32_t i = 0; i < channels; i++)
        s->channels[i].fd = CHANNEL_FREE;
    s->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    s->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->told_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->poll_fd < 0 || s->stop_fd < 0 || s->told_fd < 0 || epoll_ctl(s->poll_fd, EPOLL_CTL_ADD, s->stop_fd, &stop))
        return -errno;
    return spawn(s);
}

static void free_all(struct kvfs_sealer *s)
{
    for (uint32_t i = 0; s->channels && i < s->channel_count; i++)
        drop_channel(s, i, CHANNEL_FREE);
    for (int *fd = (int[]){s->poll_fd, s->stop_fd, s->told_fd}, i = 0; i < 3; i++)
        if (fd[i] >= 0)
            close(fd[i]);
    free(s->grants);
    free(s->channels);
    free(s->ring);
    pthread_mutex_destroy(&s->lock);
}

/* `table`, `writer`, `dirfd` and `largest_bytes` are set, all else is zero. */
int kvfs_sealer_start(struct kvfs_sealer *s, uint32_t channels, uint32_t room)
{
    s->poll_fd = s->stop_fd = s->told_fd = -1;
    s->channel_count = channels;
    s->ring_room = room;
    pthread_mutex_init(&s->lock, NULL);
    int rc = make(s, channels, room);
    s->started = rc == 0;
    if (rc < 0)
        free_all(s);
    return rc;
}

/* Ends the thread and every channel. What is left in the ring is lost: take it before. */
void kvfs_sealer_stop(struct kvfs_sealer *s)
{
    const uint64_t one = 1;
    if (!s->started)
        return;
    s->started = 0;
    (void)!write(s->stop_fd, &one, sizeof one);
    pthread_join(s->thread, NULL);
    free_all(s);
}

/* Takes over `fd`, a packet socket; the channel's number, or -errno. */
int64_t kvfs_sealer_open(struct kvfs_sealer *s, int fd, uint32_t uid, uint32_t bucket_id)
{
    int64_t number = -EMFILE;
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < s->channel_count && number < 0; i++)
        if (s->channels[i].fd == CHANNEL_FREE)
            number = i;
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = (uint64_t)number};
    if (number >= 0 && epoll_ctl(s->poll_fd, EPOLL_CTL_ADD, fd, &event) != 0)
        number = -errno;
    if (number >= 0)
        s->channels[number] = (struct kvfs_seal_channel){.fd = fd, .uid = uid, .bucket_id = bucket_id};
    pthread_mutex_unlock(&s->lock);
    return number;
}

void kvfs_sealer_close(struct kvfs_sealer *s, uint32_t channel)
{
    pthread_mutex_lock(&s->lock);
    drop_channel(s, channel, CHANNEL_FREE);
    pthread_mutex_unlock(&s->lock);
}

void kvfs_sealer_grant(struct kvfs_sealer *s, uint32_t slot, uint32_t generation, uint32_t channel)
{
    pthread_mutex_lock(&s->lock);
    s->grants[slot] = (struct kvfs_grant){.generation = generation, .channel = channel + 1};
    pthread_mutex_unlock(&s->lock);
}

/* From here on the draft of this slot is the event loop's alone. */
void kvfs_sealer_revoke(struct kvfs_sealer *s, uint32_t slot)
{
    pthread_mutex_lock(&s->lock);
    s->grants[slot] = (struct kvfs_grant){0};
    pthread_mutex_unlock(&s->lock);
}

void kvfs_sealer_give_ids(struct kvfs_sealer *s, uint64_t first, uint64_t count)
{
    pthread_mutex_lock(&s->lock);
    s->next_id = first;
    s->end_id = first + count;
    pthread_mutex_unlock(&s->lock);
}

uint64_t kvfs_sealer_ids_left(struct kvfs_sealer *s)
{
    pthread_mutex_lock(&s->lock);
    uint64_t left = s->end_id - s->next_id;
    pthread_mutex_unlock(&s->lock);
    return left;
}

/* Moves at most `most` records out, oldest first; how many. */
uint32_t kvfs_sealer_take(struct kvfs_sealer *s, struct kvfs_sealed *into, uint32_t most)
{
    uint64_t told;
    pthread_mutex_lock(&s->lock);
    uint32_t n = s->count < most ? s->count : most;
    for (uint32_t i = 0; i < n; i++)
        into[i] = s->ring[(s->head + i) % s->ring_room];
    s->head = (s->head + n) % s->ring_room;
    s->count -= n;
    if (s->count == 0)
        (void)!read(s->told_fd, &told, sizeof told);
    pthread_mutex_unlock(&s->lock);
    return n;
}

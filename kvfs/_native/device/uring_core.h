/* Reads, writes and syncs of files through one io_uring. See uring_core.c. */
#ifndef KVFS_DEVICE_CORE_H
#define KVFS_DEVICE_CORE_H

#include <stddef.h>
#include <stdint.h>

enum kvfs_device_op { KVFS_DEVICE_READ, KVFS_DEVICE_WRITE, KVFS_DEVICE_SYNC };

struct kvfs_device_result {
    uint32_t request;
    int error;         /* 0, or -errno; -ENODATA: a read met the end of the file */
    uint64_t moved;    /* bytes */
    uint64_t checksum; /* of a read's payload */
};

struct kvfs_device;

/* The functions that fail return -errno. */
int kvfs_device_start(struct kvfs_device **out, uint32_t depth, uint32_t max_buffers);
/* Returns the number of the request, below `depth`; -EAGAIN: `depth` are in flight, -ESHUTDOWN. */
int kvfs_device_submit(struct kvfs_device *d, enum kvfs_device_op op, int fd, uint64_t offset, void *data, size_t bytes,
                       size_t payload_bytes);
/* To be registered before the next request; -EAGAIN: `max_buffers` are. */
int kvfs_device_add_buffer(struct kvfs_device *d, void *data, size_t bytes);
/* Moves what has ended to `out` (`depth` results at most) and returns how many. */
uint32_t kvfs_device_reap(struct kvfs_device *d, struct kvfs_device_result *out);
int kvfs_device_done_fd(struct kvfs_device *d); /* readable when there is something to reap */
uint32_t kvfs_device_registered(struct kvfs_device *d);
int kvfs_device_deferred(struct kvfs_device *d); /* 1: the ring runs with DEFER_TASKRUN */
/* Cancels what is in flight and ends the threads. 0: nothing runs, and the last results are to be reaped.
 * -ETIMEDOUT: the kernel still owns memory; `d` and that memory must stay for ever. */
int kvfs_device_stop(struct kvfs_device *d, int64_t timeout_ns);
void kvfs_device_free(struct kvfs_device *d); /* REQUIRES a stop that returned 0 */

#endif

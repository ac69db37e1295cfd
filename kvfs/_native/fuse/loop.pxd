"""The C of the native FUSE loop (loop.h), for `loop.pyx`."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "fuse/loop.h" nogil:
    struct fuse_loop:
        pass
    enum fl_state:
        FL_NONE, FL_OTHER, FL_DRAFT, FL_SEALED, FL_DEAD
    struct fl_config:
        int dev_fd
        int slots_dir_fd
        const char *generations
        uint64_t generation_stride
        uint32_t slot_count
        int passthrough
        int threads
        uint32_t buffer_size
        uint64_t largest_object
        uint64_t attr_valid_s
        uint64_t unresolved_names
    struct fl_open_record:
        uint64_t nodeid
        uint32_t uid
        uint32_t pid
    enum fw_opcode:
        FW_LOOKUP, FW_FORGET, FW_FALLOCATE, FW_CREATE, FW_UNLINK, FW_RENAME2, FW_RELEASE, FW_READDIRPLUS
    enum fl_done:
        FL_CREATED, FL_RENAMED
    struct fl_call:
        uint64_t unique
        uint64_t nodeid
        uint64_t offset
        uint64_t other
        uint32_t opcode
        uint32_t uid
        uint32_t gid
        uint32_t pid
        uint32_t flags
        uint32_t mode
        uint32_t size
        uint64_t when_ns
        uint16_t name_length
        uint16_t new_length
        char name[256]
        char new_name[256]
    struct fl_stats:
        uint64_t relayed
        uint64_t calls
        uint64_t native_opens
        uint64_t native_reads
        uint64_t native_writes
        uint64_t native_getattrs
        uint64_t native_lookups
        uint64_t native_creates
        uint64_t native_renames
        uint64_t native_listings
        uint64_t invalidations
        uint64_t dropped_records
        uint64_t most_names_moved
    struct fl_listed:
        uint64_t ino
        uint8_t type
        uint8_t length
    struct fw_attr:
        uint64_t ino
        uint64_t size
        uint64_t blocks
        uint64_t atime
        uint64_t mtime
        uint64_t ctime
        uint32_t atimensec
        uint32_t mtimensec
        uint32_t ctimensec
        uint32_t mode
        uint32_t nlink
        uint32_t uid
        uint32_t gid
        uint32_t rdev
        uint32_t blksize
        uint32_t flags
    int fl_create(const fl_config *config, fuse_loop **out)
    void fl_destroy(fuse_loop *loop)
    int fl_start(fuse_loop *loop)
    int fl_is_drained(fuse_loop *loop)
    void fl_stop(fuse_loop *loop)
    int fl_library_fd(fuse_loop *loop)
    int fl_up_fd(fuse_loop *loop)
    int fl_ended_fd(fuse_loop *loop)
    int fl_failure(fuse_loop *loop, const char **where)
    int fl_passthrough(fuse_loop *loop)
    void fl_get_stats(fuse_loop *loop, fl_stats *out)
    int fl_node_set(fuse_loop *loop, uint64_t nodeid, fl_state state, uint32_t slot, uint32_t generation,
                    const fw_attr *attr)
    uint64_t fl_node_drop(fuse_loop *loop, uint64_t nodeid)
    int fl_link(fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid)
    void fl_unlink(fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid)
    void fl_mark_unresolved(fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid)
    void fl_clear_unresolved(fuse_loop *loop, uint64_t parent, const char *name, uint32_t length)
    int fl_is_free(fuse_loop *loop, uint64_t parent, const char *name, uint32_t length)
    int fl_know_names(fuse_loop *loop, uint64_t nodeid, uint32_t room, const char *names)
    int fl_spare_add(fuse_loop *loop, uint64_t nodeid, uint64_t fh, int fd)
    uint32_t fl_spare_count(fuse_loop *loop)
    uint64_t fl_spare_take(fuse_loop *loop)
    uint64_t fl_drain_misses(fuse_loop *loop)
    int fl_listing_open(fuse_loop *loop, uint64_t fh, uint64_t start)
    void fl_listing_close(fuse_loop *loop, uint64_t fh)
    int fl_listing_fill(fuse_loop *loop, uint64_t fh, uint64_t first, char *names, uint32_t count, int ended)
    void fl_answer_listing(fuse_loop *loop, uint64_t unique, uint64_t fh, uint64_t offset, uint32_t size)
    int fl_calls_waiting(fuse_loop *loop)
    void fl_watch_calls(fuse_loop *loop, int watched)
    int fl_await_calls(fuse_loop *loop, uint64_t timeout_ns)
    int fl_acquire(fuse_loop *loop, uint64_t nodeid, int fd)
    int fl_release(fuse_loop *loop, uint64_t nodeid)
    int fl_opens(fuse_loop *loop, uint64_t nodeid)
    int fl_touch(fuse_loop *loop, uint64_t nodeid, uint64_t when_ns)
    int fl_node_locks(fuse_loop *loop, uint64_t nodeid, uint64_t key)
    int fl_expect(fuse_loop *loop, uint32_t thread, int expected)
    int fl_calls_fd(fuse_loop *loop)
    uint32_t fl_take_calls(fuse_loop *loop, fl_call *out, uint32_t capacity)
    void fl_answer_status(fuse_loop *loop, uint64_t unique, int status)
    int fl_answer_entry(fuse_loop *loop, uint64_t unique, uint64_t nodeid)
    int fl_answer_created(fuse_loop *loop, uint64_t unique, uint64_t nodeid, uint64_t fh)
    int fl_allocate(fuse_loop *loop, uint64_t nodeid, uint32_t mode, uint64_t offset, uint64_t length)
    int fl_probe(fuse_loop *loop, int fd)
    int fl_node_settles(fuse_loop *loop, uint64_t nodeid, int settles)
    int fl_killed(fuse_loop *loop, uint64_t nodeid)
    int fl_flushed(fuse_loop *loop, uint64_t nodeid)
    int fl_died_by_signal(uint32_t pid)
    void fl_relay_opens(fuse_loop *loop, int relay)
    uint32_t fl_drain_opens(fuse_loop *loop, fl_open_record *out, uint32_t capacity)
    int fl_invalidate_entry(fuse_loop *loop, uint64_t parent, const char *name, uint32_t length)
    int fl_invalidate_attr(fuse_loop *loop, uint64_t nodeid)

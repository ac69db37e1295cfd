"""Python's seam to the native FUSE loop (loop.h): life, nodes, backings, invalidations.

Concurrency: every method may be called from any thread; the loop's own lock orders them. `stop` waits for
the loop's threads without the GIL.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from kvfs._native.shared.table cimport Table, kvfs_slot_header, kvfs_table

import os

from kvfs.errors import from_errno

cdef enum:
    DRAIN_BATCH = 256
    CALL_BATCH = 16
    DT_DIR = 4
    DT_REG = 8
    DT_LNK = 10
    MAX_NAME = 255

LOOKUP = FW_LOOKUP
FORGET = FW_FORGET
FALLOCATE = FW_FALLOCATE
CREATE = FW_CREATE
UNLINK = FW_UNLINK
RENAME = FW_RENAME2
RELEASE = FW_RELEASE
READDIRPLUS = FW_READDIRPLUS
CREATED = FL_CREATED
RENAMED = FL_RENAMED

cdef int64_t NANOSECONDS = 1000000000
"""Signed, as the times are: the kernel takes whole seconds before 1970, and nanoseconds that count up from there."""


def died_by_signal(uint32_t pid):
    """Return whether a process or thread is exiting because of a signal (proc_pid_stat(5))."""
    return bool(fl_died_by_signal(pid))


cdef class Call:
    """One request that the store has to answer: through `FuseLoop.answer_*`, except for RELEASE and FORGET.

    CREATED and RENAMED report what the loop has done and answered by itself.
    """

    cdef readonly int opcode
    cdef readonly uint64_t unique
    cdef readonly uint64_t nodeid
    cdef readonly uint64_t offset
    cdef readonly uint64_t other
    cdef readonly uint32_t uid
    cdef readonly uint32_t gid
    cdef readonly uint32_t pid
    cdef readonly uint32_t flags
    cdef readonly uint32_t mode
    cdef readonly uint32_t size
    cdef readonly uint64_t when_ns
    cdef readonly bytes name
    cdef readonly bytes new_name


cdef Call _call(const fl_call *raw):
    cdef Call call = Call.__new__(Call)
    call.opcode = <int> raw.opcode
    call.unique = raw.unique
    call.nodeid = raw.nodeid
    call.offset = raw.offset
    call.other = raw.other
    call.uid = raw.uid
    call.gid = raw.gid
    call.pid = raw.pid
    call.flags = raw.flags
    call.mode = raw.mode
    call.size = raw.size
    call.when_ns = raw.when_ns
    call.name = raw.name[:raw.name_length]
    call.new_name = raw.new_name[:raw.new_length]
    return call


cdef void file_attr(
    fw_attr *attr, uint64_t ino, uint64_t size_bytes, uint32_t mode, uint32_t uid, uint32_t gid,
    int64_t mtime_ns, int64_t ctime_ns,
) noexcept:
    memset(attr, 0, sizeof(attr[0]))
    attr.ino = ino
    attr.size = size_bytes
    attr.blocks = (size_bytes + 511) // 512
    attr.atime = attr.mtime = <uint64_t> (mtime_ns // NANOSECONDS)
    attr.atimensec = attr.mtimensec = <uint32_t> (mtime_ns % NANOSECONDS)
    attr.ctime = <uint64_t> (ctime_ns // NANOSECONDS)
    attr.ctimensec = <uint32_t> (ctime_ns % NANOSECONDS)
    attr.mode = mode
    attr.nlink = 1
    attr.uid = uid
    attr.gid = gid
    attr.blksize = 4096


cdef class FuseLoop:
    """Serve one mounted /dev/fuse descriptor natively; see loop.h for the invariants."""

    cdef fuse_loop *_loop
    cdef Table _table

    def __cinit__(
        self, int dev_fd, int slots_dir_fd, Table table not None, *, bint passthrough, int threads,
        uint32_t buffer_size, uint64_t largest_object, uint64_t attr_valid_s, uint64_t unresolved_names,
    ):
        cdef fl_config config
        cdef kvfs_table *pointer = table.pointer()
        config.dev_fd = dev_fd
        config.slots_dir_fd = slots_dir_fd
        config.generations = <const char *> &pointer.slots[0].generation
        config.generation_stride = sizeof(kvfs_slot_header)
        config.slot_count = pointer.slot_count
        config.passthrough = passthrough
        config.threads = threads
        config.buffer_size = buffer_size
        config.largest_object = largest_object
        config.attr_valid_s = attr_valid_s
        config.unresolved_names = unresolved_names
        self._table = table
        self._check(fl_create(&config, &self._loop), "the native FUSE loop")

    def __dealloc__(self):
        if self._loop != NULL:
            fl_stop(self._loop)
            fl_destroy(self._loop)
            self._loop = NULL

    cdef int _check(self, int status, what) except -1:
        if status < 0:
            raise from_errno(status, what)
        return status

    def start(self):
        self._check(fl_start(self._loop), "the threads of the native FUSE loop")

    @property
    def is_drained(self):
        """Return whether all that the kernel has queued is answered, relayed, or a call."""
        return bool(fl_is_drained(self._loop))

    def stop(self):
        with nogil:
            fl_stop(self._loop)

    @property
    def library_fd(self):
        return fl_library_fd(self._loop)

    @property
    def up_fd(self):
        return fl_up_fd(self._loop)

    @property
    def ended_fd(self):
        return fl_ended_fd(self._loop)

    @property
    def failure(self):
        """Return why the loop cannot serve any more; None while it can, and when the kernel has ended the mount."""
        cdef const char *where = NULL
        cdef int error = fl_failure(self._loop, &where)
        if error == 0:
            return None
        return OSError(error, os.strerror(error), where.decode())

    @property
    def passthrough(self):
        return bool(fl_passthrough(self._loop))

    @property
    def lists_names(self):
        """Allow listings without attributes: see `listing_open`."""
        return True

    def stats(self):
        cdef fl_stats stats
        fl_get_stats(self._loop, &stats)
        return {
            "relayed": stats.relayed,
            "calls": stats.calls,
            "native_opens": stats.native_opens,
            "native_reads": stats.native_reads,
            "native_writes": stats.native_writes,
            "native_getattrs": stats.native_getattrs,
            "native_lookups": stats.native_lookups,
            "native_creates": stats.native_creates,
            "native_renames": stats.native_renames,
            "native_listings": stats.native_listings,
            "invalidations": stats.invalidations,
            "dropped_records": stats.dropped_records,
            "most_names_moved": stats.most_names_moved,
        }

    def node_directory(
        self, uint64_t nodeid, uint64_t ino, *, uint32_t mode, uint32_t uid, uint32_t gid, int64_t mtime_ns,
        int64_t ctime_ns=0,
    ):
        """Add a directory. The kernel asks for its attributes after every change in it. `mode` has the file type."""
        cdef fw_attr attr
        memset(&attr, 0, sizeof(attr))
        attr.ino = ino
        attr.atime = attr.mtime = <uint64_t> (mtime_ns // NANOSECONDS)
        attr.atimensec = attr.mtimensec = <uint32_t> (mtime_ns % NANOSECONDS)
        attr.ctime = <uint64_t> ((ctime_ns or mtime_ns) // NANOSECONDS)
        attr.ctimensec = <uint32_t> ((ctime_ns or mtime_ns) % NANOSECONDS)
        attr.mode = mode
        attr.nlink = 1
        attr.uid = uid
        attr.gid = gid
        attr.blksize = 4096
        self._check(fl_node_set(self._loop, nodeid, FL_OTHER, 0, 0, &attr), f"node {nodeid}")

    def node_draft(
        self, uint64_t nodeid, uint64_t ino, uint32_t slot, uint32_t generation, *, uint32_t mode, uint32_t uid,
        uint32_t gid, int64_t ctime_ns=0,
    ):
        """Add a file being written; its size and times are the slot file's, but for a later change of attributes at
        `ctime_ns`. `mode` has the file type."""
        cdef fw_attr attr
        memset(&attr, 0, sizeof(attr))
        attr.ino = ino
        attr.ctime = <uint64_t> (ctime_ns // NANOSECONDS)
        attr.ctimensec = <uint32_t> (ctime_ns % NANOSECONDS)
        attr.mode = mode
        attr.nlink = 1
        attr.uid = uid
        attr.gid = gid
        attr.blksize = 4096
        self._check(fl_node_set(self._loop, nodeid, FL_DRAFT, slot, generation, &attr), f"node {nodeid}")

    def node_sealed(
        self, uint64_t nodeid, uint64_t ino, uint32_t slot, uint32_t generation, *, uint64_t size_bytes,
        uint32_t mode, uint32_t uid, uint32_t gid, int64_t mtime_ns, int64_t ctime_ns,
    ):
        """Add a sealed file in DRAM. `mode` has the file type."""
        cdef fw_attr attr
        file_attr(&attr, ino, size_bytes, mode, uid, gid, mtime_ns, ctime_ns)
        self._check(fl_node_set(self._loop, nodeid, FL_SEALED, slot, generation, &attr), f"node {nodeid}")

    def node_offloaded(
        self, uint64_t nodeid, uint64_t ino, *, uint64_t size_bytes, uint32_t mode, uint32_t uid, uint32_t gid,
        int64_t mtime_ns, int64_t ctime_ns,
    ):
        """Add a sealed file that is not in DRAM: its attributes are answered here, its OPEN is relayed."""
        cdef fw_attr attr
        file_attr(&attr, ino, size_bytes, mode, uid, gid, mtime_ns, ctime_ns)
        self._check(fl_node_set(self._loop, nodeid, FL_OTHER, 0, 0, &attr), f"node {nodeid}")

    def node_settles(self, uint64_t nodeid, bint settles):
        """Set whether close() of a writer waits for the library."""
        self._check(fl_node_settles(self._loop, nodeid, settles), f"node {nodeid}")

    def touch(self, uint64_t nodeid, uint64_t when_ns):
        """Set a directory's times after a change of its names; return whether the kernel may have others."""
        return bool(fl_touch(self._loop, nodeid, when_ns))

    def node_locks(self, uint64_t nodeid, uint64_t key):
        """Put the node's locks on `key`, an inode number, together with those of other versions of its file."""
        self._check(fl_node_locks(self._loop, nodeid, key), f"node {nodeid}")

    def node_dead(self, uint64_t nodeid):
        """Answer ESTALE to OPEN: the object is removed or replaced. Open handles stay as they are."""
        self._check(fl_node_set(self._loop, nodeid, FL_DEAD, 0, 0, NULL), f"node {nodeid}")

    def node_drop(self, uint64_t nodeid):
        """Drop a node, unless lookups of it were answered natively; return their number."""
        return fl_node_drop(self._loop, nodeid)

    def link(self, uint64_t parent, bytes name not None, uint64_t nodeid):
        """Answer LOOKUP of the name with this node from now on."""
        self._check(fl_link(self._loop, parent, name, <uint32_t> len(name), nodeid), f"node {nodeid}")

    def unlink(self, uint64_t parent, bytes name not None, uint64_t nodeid):
        """Take the name away from this node; a name that leads to another node by now stays."""
        fl_unlink(self._loop, parent, name, <uint32_t> len(name), nodeid)

    def mark_unresolved(self, uint64_t parent, bytes name not None, uint64_t nodeid):
        """Make LOOKUP of the name, which led to the node (0: to none), a call: something may have it."""
        fl_mark_unresolved(self._loop, parent, name, <uint32_t> len(name), nodeid)

    def clear_unresolved(self, uint64_t parent, bytes name not None):
        """Note that nothing has this name, unless a node is linked under it."""
        fl_clear_unresolved(self._loop, parent, name, <uint32_t> len(name))

    def is_free(self, uint64_t parent, bytes name not None):
        """Return whether all names of a directory are known, and this is none of them."""
        return bool(fl_is_free(self._loop, parent, name, <uint32_t> len(name)))

    def know_names(self, uint64_t nodeid, uint32_t room, bytes names not None):
        """Note that a directory has no names but linked ones and `names` (separated by `/`), which are unresolved.

        `room` is the length in bytes of the longest name that can be made there; 0: its names are unknown.
        """
        self._check(fl_know_names(self._loop, nodeid, room, names), f"node {nodeid}")

    def spare_add(self, uint64_t nodeid, uint64_t fh, int fd):
        """Give a draft (`node_draft`) without a name to a CREATE to come; `fd` is its backing. Raises OSError."""
        cdef int status
        with nogil:
            status = fl_spare_add(self._loop, nodeid, fh, fd)
        self._check(status, f"the spare draft of node {nodeid}")

    @property
    def spares(self):
        return fl_spare_count(self._loop)

    def spare_take(self):
        """Drop a spare draft that no CREATE has taken; return its nodeid, 0 when there is none."""
        return fl_spare_take(self._loop)

    def listing_open(self, uint64_t fh, uint64_t start):
        """Answer READDIRPLUS of this handle from the offset `start` on from `listing_fill`; else it is a call."""
        self._check(fl_listing_open(self._loop, fh, start), f"the listing {fh}")

    def listing_close(self, uint64_t fh):
        fl_listing_close(self._loop, fh)

    def listing_fill(self, uint64_t fh, uint64_t first, list names not None, bint ended):
        """Replace the names kept for a handle by those after the first `first`, each with its inode number and whether
        it is a symbolic link; a directory's ends in `/`. `ended`: nothing follows. Raises KvfsError."""
        cdef size_t room = 1
        cdef char *packed
        cdef char *at
        cdef fl_listed head
        cdef bytes tail
        cdef Py_ssize_t length
        cdef bint directory, link
        for tail, _, _ in names:
            room += sizeof(fl_listed) + <size_t> len(tail)
        packed = at = <char *> malloc(room)
        if packed == NULL:
            raise MemoryError
        try:
            for tail, ino, link in names:
                length = len(tail)
                directory = length > 0 and (<const char *> tail)[length - 1] == c"/"
                length -= directory
                if length > MAX_NAME:
                    raise ValueError(f"a name of {length} bytes")
                head.ino = ino
                head.type = DT_DIR if directory else DT_LNK if link else DT_REG
                head.length = <uint8_t> length
                memcpy(at, &head, sizeof(head))
                memcpy(at + sizeof(head), <const char *> tail, <size_t> length)
                at += sizeof(head) + <size_t> length
            self._check(
                fl_listing_fill(self._loop, fh, first, packed, <uint32_t> len(names), ended), f"the listing {fh}"
            )
        except BaseException:
            free(packed)
            raise

    def answer_listing(self, uint64_t unique, uint64_t fh, uint64_t offset, uint32_t size):
        """Answer a listing with the names after the first `offset` of those that `listing_fill` gave."""
        fl_answer_listing(self._loop, unique, fh, offset, size)

    def acquire(self, uint64_t nodeid, int fd):
        """Count an open handle; the first one makes `fd` the backing. Return the count. Raises KvfsError, OSError."""
        cdef int status
        with nogil:
            status = fl_acquire(self._loop, nodeid, fd)
        return self._check(status, f"the backing of node {nodeid}")

    def release(self, uint64_t nodeid):
        """Count a handle closed, the last of which ends the backing; return the count."""
        cdef int status
        with nogil:
            status = fl_release(self._loop, nodeid)
        return self._check(status, f"the backing of node {nodeid}")

    def opens(self, uint64_t nodeid):
        return fl_opens(self._loop, nodeid)

    def expect(self, uint32_t thread, bint expected):
        """Set whether LOOKUP and OPEN of this thread come to Python. Raises NoSpace."""
        self._check(fl_expect(self._loop, thread, expected), f"thread {thread}")

    def killed(self, uint64_t nodeid):
        """Return whether the last FLUSH of the node came from a process that is dying by a signal."""
        return bool(fl_killed(self._loop, nodeid))

    def flushed(self, uint64_t nodeid):
        """Return whether a descriptor of the node was closed: its RELEASE may be under way."""
        return bool(fl_flushed(self._loop, nodeid))

    def relay_opens(self, bint relay):
        """Set whether every OPEN goes to Python (a quota is being enforced)."""
        fl_relay_opens(self._loop, relay)

    @property
    def calls_fd(self):
        return fl_calls_fd(self._loop)

    @property
    def calls_waiting(self):
        return bool(fl_calls_waiting(self._loop))

    def watch_calls(self, bint watched):
        """Set whether somebody watches for calls; `calls_fd` does not become readable meanwhile."""
        fl_watch_calls(self._loop, watched)

    def await_calls(self, uint64_t timeout_ns):
        """Spin until calls are waiting, or the time is over; return whether there are any."""
        cdef int found
        with nogil:
            found = fl_await_calls(self._loop, timeout_ns)
        return bool(found)

    def take_calls(self):
        """Take queued calls, the oldest first; more may be left."""
        cdef fl_call calls[CALL_BATCH]
        cdef uint32_t count = fl_take_calls(self._loop, calls, CALL_BATCH), i
        return [_call(&calls[i]) for i in range(count)]

    def answer_status(self, uint64_t unique, int error):
        """Answer with an errno, 0 for success."""
        fl_answer_status(self._loop, unique, -error)

    def answer_entry(self, uint64_t unique, uint64_t nodeid):
        """Answer with the node and its attributes, counted natively as a lookup."""
        fl_answer_entry(self._loop, unique, nodeid)

    def answer_created(self, uint64_t unique, uint64_t nodeid, uint64_t fh):
        """Answer CREATE with the node, and an open handle on the backing that `acquire` attached."""
        fl_answer_created(self._loop, unique, nodeid, fh)

    def allocate(self, uint64_t nodeid, uint32_t mode, uint64_t offset, uint64_t length):
        """Call fallocate(2) on a file being written; return an errno, 0 for success."""
        cdef int status
        with nogil:
            status = fl_allocate(self._loop, nodeid, mode, offset, length)
        return -status

    def drain_opens(self):
        """Return (nodeid, uid, pid) of opens answered natively since the last call, oldest first."""
        cdef fl_open_record records[DRAIN_BATCH]
        cdef uint32_t count = DRAIN_BATCH, i
        found = []
        while count == DRAIN_BATCH:
            count = fl_drain_opens(self._loop, records, DRAIN_BATCH)
            for i in range(count):
                found.append((records[i].nodeid, records[i].uid, records[i].pid))
        return found

    def drain_misses(self):
        """Return how many LOOKUPs of free names were answered natively since the last call."""
        return fl_drain_misses(self._loop)

    def probe(self, int fd):
        """Return whether the kernel takes `fd` as a backing; turn passthrough off where it does not."""
        cdef int status
        with nogil:
            status = fl_probe(self._loop, fd)
        return self._check(status, "passthrough") == 1

    def invalidate_entry(self, uint64_t parent, bytes name not None):
        """Make the kernel look `name` up again; never waits."""
        fl_invalidate_entry(self._loop, parent, name, <uint32_t> len(name))

    def invalidate_attr(self, uint64_t nodeid):
        """Make the kernel ask for the node's attributes again; never waits."""
        fl_invalidate_attr(self._loop, nodeid)

/* The parts of the FUSE kernel protocol that the loop reads and rewrites.
 *
 * Source: include/uapi/linux/fuse.h of Linux 6.18 (protocol 7.45). Declared here because distributions
 * ship older headers: Debian 12's (7.38) lacks passthrough. Only fields that are used have names.
 */
#ifndef KVFS_FUSE_WIRE_H
#define KVFS_FUSE_WIRE_H

#include <linux/ioctl.h>
#include <stdint.h>

enum fw_opcode {
    FW_LOOKUP = 1,
    FW_FORGET = 2,
    FW_GETATTR = 3,
    FW_SETATTR = 4,
    FW_SYMLINK = 6,
    FW_MKNOD = 8,
    FW_MKDIR = 9,
    FW_UNLINK = 10,
    FW_RENAME = 12,
    FW_LINK = 13,
    FW_OPEN = 14,
    FW_READ = 15,
    FW_WRITE = 16,
    FW_RELEASE = 18,
    FW_FSYNC = 20,
    FW_GETXATTR = 22,
    FW_FLUSH = 25,
    FW_INIT = 26,
    FW_GETLK = 31,
    FW_SETLK = 32,
    FW_SETLKW = 33,
    FW_CREATE = 35,
    FW_INTERRUPT = 36,
    FW_BATCH_FORGET = 42,
    FW_FALLOCATE = 43,
    FW_READDIRPLUS = 44,
    FW_RENAME2 = 45,
    FW_LSEEK = 46,
};

enum fw_notify { FW_NOTIFY_INVAL_INODE = 2, FW_NOTIFY_INVAL_ENTRY = 3, FW_NOTIFY_INC_EPOCH = 8 };

#define FW_INIT_FLAG_POSIX_LOCKS (1u << 1)
#define FW_INIT_FLAG_FLOCK_LOCKS (1u << 10)
#define FW_INIT_FLAG_CACHE_SYMLINKS (1u << 23)
#define FW_INIT_FLAG_EXT (1u << 30)
#define FW_INIT_FLAG_KILLPRIV_V2 (1u << 28)
#define FW_INIT_FLAG2_PASSTHROUGH (1u << 5)
#define FW_INIT_FLAG2_DIRECT_IO_ALLOW_MMAP (1u << 4)

#define FW_FOPEN_DIRECT_IO (1u << 0)
#define FW_FOPEN_KEEP_CACHE (1u << 1)
#define FW_FOPEN_NOFLUSH (1u << 5)
#define FW_FOPEN_PASSTHROUGH (1u << 7)
/* Any other open flag beside PASSTHROUGH makes the kernel answer EIO (fs/fuse/iomode.c). */
#define FW_FOPEN_PASSTHROUGH_MASK (FW_FOPEN_DIRECT_IO | (1u << 6) | FW_FOPEN_NOFLUSH | FW_FOPEN_PASSTHROUGH)

struct fw_in_header {
    uint32_t len;
    uint32_t opcode;
    uint64_t unique;
    uint64_t nodeid;
    uint32_t uid;
    uint32_t gid;
    uint32_t pid;
    uint16_t total_extlen;
    uint16_t padding;
};

struct fw_out_header {
    uint32_t len;
    int32_t error;
    uint64_t unique;
};

struct fw_attr {
    uint64_t ino, size, blocks;
    uint64_t atime, mtime, ctime;
    uint32_t atimensec, mtimensec, ctimensec;
    uint32_t mode, nlink, uid, gid, rdev, blksize, flags;
};

struct fw_entry_out {
    uint64_t nodeid, generation, entry_valid, attr_valid;
    uint32_t entry_valid_nsec, attr_valid_nsec;
    struct fw_attr attr;
};

struct fw_attr_out {
    uint64_t attr_valid;
    uint32_t attr_valid_nsec, dummy;
    struct fw_attr attr;
};

struct fw_open_in {
    uint32_t flags, open_flags;
};

struct fw_create_in {
    uint32_t flags, mode, umask, open_flags;
};

struct fw_rename_in {
    uint64_t newdir;
    /* then both names */
};

struct fw_rename2_in {
    uint64_t newdir;
    uint32_t flags, padding;
    /* then both names */
};

struct fw_open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};

struct fw_release_in {
    uint64_t fh;
    uint32_t flags, release_flags;
    uint64_t lock_owner;
};

struct fw_read_in {
    uint64_t fh, offset;
    uint32_t size, read_flags;
    uint64_t lock_owner;
    uint32_t flags, padding;
};

struct fw_write_in {
    uint64_t fh, offset;
    uint32_t size, write_flags;
    uint64_t lock_owner;
    uint32_t flags, padding;
};

struct fw_write_out {
    uint32_t size, padding;
};

struct fw_getxattr_in {
    uint32_t size, padding;
};

#define FW_LK_FLOCK 1u
#define FW_RELEASE_FLOCK_UNLOCK 2u

struct fw_lk_in {
    uint64_t fh, owner;
    uint64_t start, end;
    uint32_t type, pid;
    uint32_t lk_flags, padding;
};

struct fw_lk_out {
    uint64_t start, end;
    uint32_t type, pid;
};

struct fw_flush_in {
    uint64_t fh;
    uint32_t unused, padding;
    uint64_t lock_owner;
};

struct fw_fallocate_in {
    uint64_t fh, offset, length;
    uint32_t mode, padding;
};

struct fw_lseek_in {
    uint64_t fh, offset;
    uint32_t whence, padding;
};

struct fw_lseek_out {
    uint64_t offset;
};

struct fw_direntplus {
    struct fw_entry_out entry;
    uint64_t ino, off;
    uint32_t namelen, type;
    /* then the name, padded to 8 bytes */
};

struct fw_forget_one {
    uint64_t nodeid, nlookup;
};

struct fw_batch_forget_in {
    uint32_t count, dummy;
    /* then `count` of fw_forget_one */
};

struct fw_init_in {
    uint32_t major, minor, max_readahead, flags, flags2;
};

struct fw_init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth;
};

struct fw_backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};

#define FW_IOC_BACKING_OPEN _IOW(229, 1, struct fw_backing_map)
#define FW_IOC_BACKING_CLOSE _IOW(229, 2, uint32_t)

_Static_assert(sizeof(struct fw_in_header) == 40, "fuse_in_header");
_Static_assert(sizeof(struct fw_attr) == 88, "fuse_attr");
_Static_assert(sizeof(struct fw_entry_out) == 128, "fuse_entry_out");
_Static_assert(sizeof(struct fw_direntplus) == 152, "fuse_direntplus");
_Static_assert(FW_IOC_BACKING_OPEN == 0x4010E501, "FUSE_DEV_IOC_BACKING_OPEN");
_Static_assert(FW_IOC_BACKING_CLOSE == 0x4004E502, "FUSE_DEV_IOC_BACKING_CLOSE");

#endif

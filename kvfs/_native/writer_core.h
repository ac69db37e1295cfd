/* Filling drafts. See writer_core.c. */
#ifndef KVFS_WRITER_CORE_H
#define KVFS_WRITER_CORE_H

#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

int kvfs_write_fd(int fd, uint64_t offset, const struct iovec *vectors, ssize_t pieces);
int kvfs_map_draft(int fd, uint64_t size, void **place);

#endif

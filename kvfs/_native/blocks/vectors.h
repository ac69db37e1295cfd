/* What one call moves between a slot and a block's pieces, read or written. */
#ifndef KVFS_BLOCK_VECTORS_H
#define KVFS_BLOCK_VECTORS_H

#include <stddef.h>

#define KVFS_CALL_VECTORS 128
#define KVFS_CALL_BYTES ((size_t)1 << 30) /* Linux moves at most 2 GiB less a page in one call */

#endif

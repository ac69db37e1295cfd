/* Pages, as tables and slots on tmpfs count them. */
#ifndef KVFS_PAGES_H
#define KVFS_PAGES_H

#include <stdint.h>

#define KVFS_PAGE_BYTES 4096ull

/* The bytes of the pages that `bytes` take. */
static inline uint64_t kvfs_page_up(uint64_t bytes) { return (bytes + KVFS_PAGE_BYTES - 1) & ~(KVFS_PAGE_BYTES - 1); }

#endif

/* Arrays that grow by doubling. */
#ifndef KVFS_CLUSTER_GROWTH_H
#define KVFS_CLUSTER_GROWTH_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* The array with room for `wanted` elements of so many bytes; NULL without memory, and then it is as it was. */
static inline void *kvfs_grow(void *array, uint32_t *room, size_t wanted, size_t element_bytes) {
    size_t more = *room ? *room : 8;
    while (more < wanted) more *= 2;
    if (more == *room) return array;
    void *grown = more <= UINT32_MAX ? realloc(array, more * element_bytes) : NULL;
    if (grown) *room = (uint32_t)more;
    return grown;
}

#endif

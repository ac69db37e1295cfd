/* xxhash compiled for AVX2, for a file of its own that exports what it makes of it: twice as fast as what every x86-64 can
 * run, chosen at run time. To be included first, and only where __x86_64__ is defined.
 */
#ifndef KVFS_XXH3_AVX2_H
#define KVFS_XXH3_AVX2_H

#pragma GCC target("avx2")

/* A page and a half ahead, since the processor's own prefetching ends with each page: 1 MiB that is in no cache takes
 * 25 us, with the default distance 31 us. That lies past the end of short inputs, and of the state of the streaming
 * form, which a prefetch may. */
#define XXH_PREFETCH_DIST 6144
#pragma GCC diagnostic ignored "-Warray-bounds"
#include "xxh3.h"

#if XXH_VECTOR != XXH_AVX2
#error "this file is to be compiled for AVX2"
#endif

#endif

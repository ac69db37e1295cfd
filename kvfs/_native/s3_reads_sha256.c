/* Each native module is linked by itself: this one has its own copy of the block function. */
#include "hashing_sha256.c"

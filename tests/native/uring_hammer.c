/* Requests of one thread to rings, as fast as they are done, and stops in their middle.
 *
 * uring_hammer ROUNDS: in each round requests of random kinds and sizes, as many as there is room for or fewer, and a reap
 * of what has ended by then; every so many rounds the ring is stopped with what is in flight, and another one started.
 * Prints "done", and how many requests a stop has cancelled; "stuck" where none ended within STUCK_MS; "wrong" where one
 * ended with other bytes or another checksum than the file has, twice, or with an error of its own.
 */
#include "device/uring_core.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hash/xxh3.h"

enum { DEPTH = 8, MOST_BYTES = 16 << 10, FILE_BYTES = 256 << 10, ROUNDS_OF_A_RING = 200, STUCK_MS = 20000 };

struct asked {
    int waits, is_read;
    uint64_t offset, bytes, payload_bytes;
    uint8_t *memory;
};

static uint8_t content[FILE_BYTES];
static struct asked asked[DEPTH];
static unsigned in_flight, cancelled, seed = 1;

static uint64_t draw(uint64_t below) { return (uint64_t)rand_r(&seed) % below; }

static int fail(const char *why) {
    printf("%s\n", why);
    exit(1);
}

/* Writes put there what is there. */
static void ask(struct kvfs_device *d, int fd, uint8_t *memory) {
    const enum kvfs_device_op op = (enum kvfs_device_op)draw(3);
    struct asked next = {1, op == KVFS_DEVICE_READ, draw(FILE_BYTES - MOST_BYTES), draw(MOST_BYTES), 0, memory};
    next.payload_bytes = next.is_read ? draw(next.bytes + 1) : 0;
    if (op == KVFS_DEVICE_SYNC) next.bytes = 0;
    if (op == KVFS_DEVICE_WRITE) memcpy(memory, content + next.offset, next.bytes);
    const int number = kvfs_device_submit(d, op, fd, next.offset, memory, next.bytes, next.payload_bytes);
    if (number < 0 || asked[number].waits) fail("wrong");
    asked[number] = next;
    in_flight++;
}

static void check(const struct kvfs_device_result *result, int stopped) {
    struct asked *was = &asked[result->request];
    const uint8_t *expected = content + was->offset;
    int right = was->waits && (result->error == 0 || (stopped && result->error == -ECANCELED));
    if (right && result->error == 0)
        right = result->moved == was->bytes &&
                (!was->is_read || (memcmp(was->memory, expected, was->bytes) == 0 &&
                                   result->checksum == kvfs_xxh3_64(expected, was->payload_bytes)));
    if (!right) fail("wrong");
    was->waits = 0;
    cancelled += result->error != 0;
    in_flight--;
}

static void reap(struct kvfs_device *d, int stopped) {
    struct kvfs_device_result results[DEPTH];
    const uint32_t count = kvfs_device_reap(d, results);
    for (uint32_t i = 0; i < count; i++) check(&results[i], stopped);
}

static uint8_t *idle_memory(uint8_t *memory) {
    for (int place = 0;; place++) {
        uint8_t *at = memory + (size_t)place * MOST_BYTES;
        int used = 0;
        for (int i = 0; i < DEPTH; i++) used |= asked[i].waits && asked[i].memory == at;
        if (!used) return at;
    }
}

static void use_ring(int fd, uint8_t *memory, long rounds) {
    struct kvfs_device *d;
    if (kvfs_device_start(&d, DEPTH, 1) < 0) fail("no ring");
    for (long round = 0; round < rounds; round++) {
        struct pollfd done = {.fd = kvfs_device_done_fd(d), .events = POLLIN};
        if (round == rounds / 2 && kvfs_device_add_buffer(d, memory, (size_t)DEPTH / 2 * MOST_BYTES) < 0) fail("wrong");
        for (uint64_t more = 1 + draw(DEPTH); more > 0 && in_flight < DEPTH; more--) ask(d, fd, idle_memory(memory));
        if (poll(&done, 1, STUCK_MS) != 1) fail("stuck");
        reap(d, 0);
    }
    while (in_flight < DEPTH) ask(d, fd, idle_memory(memory));
    if (kvfs_device_stop(d, STUCK_MS * 1000000ll) < 0) fail("stuck");
    reap(d, 1);
    if (in_flight != 0) fail("wrong");
    kvfs_device_free(d);
}

int main(int argc, char **argv) {
    const long rounds = argc > 1 ? atol(argv[1]) : 1000;
    const int fd = memfd_create("content", MFD_CLOEXEC);
    uint8_t *memory = mmap(NULL, (size_t)DEPTH * MOST_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                           0);
    for (size_t i = 0; i < sizeof content; i++) content[i] = (uint8_t)draw(256);
    if (fd < 0 || memory == MAP_FAILED || write(fd, content, sizeof content) != (ssize_t)sizeof content) return 1;
    for (long done = 0; done < rounds; done += ROUNDS_OF_A_RING)
        use_ring(fd, memory, rounds - done < ROUNDS_OF_A_RING ? rounds - done : ROUNDS_OF_A_RING);
    printf("done %u\n", cancelled);
    return 0;
}

/* The FUSE loop against any requests: each input is requests, one behind the other: two bytes of a length, then so many
 * bytes as they are. A socket stands for /dev/fuse. The loop's threads are not started; this one does for each request
 * what they do, so that an input means the same each time.
 *
 * A first byte that is odd has each request's length, opcode and number put right, so that changes reach the handlers.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuse/threads.c"
#include "shared/slots_core.h"

#define BUFFER_BYTES 8192u
#define REQUEST_BYTES 512u
#define SLOTS 4
#define ROOT 1
#define REQUESTS 16
#define LOOP_INPUTS 64

static struct {
    struct fuse_loop *loop;
    uint32_t generations[SLOTS];
    int kernel, device, slots, inputs;
    char folder[256];
} stand;

static void check(int holds) {
    if (!holds) abort();
}

static void make_nodes(void) {
    const struct fw_attr directory = {.ino = ROOT, .mode = S_IFDIR | 0755, .nlink = 1};
    const struct fw_attr file = {.ino = 2, .size = 5, .mode = S_IFREG | 0644, .nlink = 1};
    check(fl_node_set(stand.loop, ROOT, FL_OTHER, 0, 0, &directory) == 0);
    check(fl_node_set(stand.loop, 2, FL_SEALED, 0, 2, &file) == 0);
    check(fl_node_set(stand.loop, 3, FL_DRAFT, 1, 1, &file) == 0);
    check(fl_node_set(stand.loop, 4, FL_OTHER, 0, 0, &file) == 0);
    check(fl_link(stand.loop, ROOT, "sealed", 6, 2) == 0 && fl_link(stand.loop, ROOT, "draft", 5, 3) == 0);
    check(fl_know_names(stand.loop, ROOT, 200, "one/two") == 0);
}

/* libFuzzer ends without it: packaging/fuzz removes the folder around. */
static void remove_slots(void) {
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        char name[KVFS_SLOT_NAME_BYTES];
        kvfs_slot_name(slot, name);
        unlinkat(stand.slots, name, 0);
    }
    rmdir(stand.folder);
}

/* A loop anew for every LOOP_INPUTS, since its queues take some milliseconds to make. */
static void begin(void) {
    int ends[2];
    char name[KVFS_SLOT_NAME_BYTES];
    if (stand.slots == 0) {
        const char *home = getenv("TMPDIR");
        snprintf(stand.folder, sizeof stand.folder, "%s/kvfs-fuzz-XXXXXX", home != NULL ? home : "/tmp");
        check(mkdtemp(stand.folder) != NULL && (stand.slots = open(stand.folder, O_RDONLY | O_DIRECTORY)) >= 0);
        atexit(remove_slots);
        for (uint32_t slot = 0; slot < SLOTS; slot++) {
            kvfs_slot_name(slot, name);
            int fd = openat(stand.slots, name, O_RDWR | O_CREAT, 0600);
            check(fd >= 0 && write(fd, "bytes", 5) == 5 && close(fd) == 0);
        }
    }
    stand.generations[0] = 2;
    stand.generations[1] = 1;
    check(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
    stand.kernel = ends[0];
    stand.device = ends[1];
    fcntl(stand.device, F_SETFL, O_NONBLOCK);
    const struct fl_config config = {
        .dev_fd = stand.device,
        .slots_dir_fd = stand.slots,
        .generations = (const char *)stand.generations,
        .generation_stride = sizeof *stand.generations,
        .slot_count = SLOTS,
        .threads = 1,
        .buffer_size = BUFFER_BYTES,
        .largest_object = 1 << 16,
        .attr_valid_s = 1,
        .unresolved_names = 8,
    };
    check(fl_create(&config, &stand.loop) == 0);
    fl_listing_open(stand.loop, 5, 0);
}

static void drain(int fd) {
    char bytes[1 << 16];
    while (recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
        ;
}

static void handle(const uint8_t *request, size_t bytes) {
    char at[sizeof(struct fw_in_header)];
    struct fl_server server = {.loop = stand.loop,
                               .request = malloc(stand.loop->request_size + FL_REQUEST_END),
                               .reply = malloc(BUFFER_BYTES)};
    check(send(stand.kernel, request, bytes, 0) == (ssize_t)bytes);
    ssize_t size = read_request(stand.loop, &server);
    check(size == (ssize_t)bytes);
    if (size >= (ssize_t)sizeof at) pass_on(&server, (struct fw_in_header *)server.request, (size_t)size);
    free(server.request);
    free(server.reply);
    drain(stand.kernel);
    drain(fl_library_fd(stand.loop));
}

static void take_calls(void) {
    struct fl_call calls[8];
    for (uint32_t n = 8; n == 8;) {
        n = fl_take_calls(stand.loop, calls, 8);
        for (uint32_t i = 0; i < n; i++)
            check(calls[i].name_length <= FL_CALL_NAME_MAX && calls[i].new_length <= FL_CALL_NAME_MAX);
    }
}

static void end(void) {
    fl_destroy(stand.loop);
    close(stand.kernel);
    close(stand.device);
}

static void reset_nodes(void) {
    for (uint64_t nodeid = ROOT; nodeid <= 4; nodeid++) {
        while (fl_release(stand.loop, nodeid) > 0)
            ;
        fl_node_drop(stand.loop, nodeid);
    }
    make_nodes();
    for (uint32_t slot = 1; slot < SLOTS; slot++) { /* what drafts were made to be, they are no more */
        char name[KVFS_SLOT_NAME_BYTES];
        kvfs_slot_name(slot, name);
        int fd = openat(stand.slots, name, O_RDWR);
        check(fd >= 0 && ftruncate(fd, 5) == 0 && close(fd) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) return 0;
    const int is_right = *data++ & 1;
    size--;
    if (stand.inputs++ % LOOP_INPUTS == 0) {
        if (stand.loop != NULL) end();
        begin();
    }
    reset_nodes();
    for (uint64_t n = 1; n <= REQUESTS && size > 2; n++) {
        uint8_t request[REQUEST_BYTES];
        size_t bytes = (data[0] | (size_t)data[1] << 8) % REQUEST_BYTES;
        data += 2, size -= 2;
        bytes = bytes < size ? bytes : size;
        memcpy(request, data, bytes);
        data += bytes, size -= bytes;
        if (is_right && bytes >= sizeof(struct fw_in_header)) {
            struct fw_in_header header;
            memcpy(&header, request, sizeof header);
            header.len = (uint32_t)bytes;
            header.opcode %= 53;
            header.unique = 4 * n + 2;
            memcpy(request, &header, sizeof header);
        }
        if (bytes > 0) /* nothing would be the end */
            handle(request, bytes);
        take_calls();
    }
    return 0;
}

/* A reader of the shared table without Python: what a client library or a FUSE loop does with table_core.h.
 *
 * table_reader TABLE STEADY CHURN: until the table is dead, looks up keys that are there for a whole epoch and keys
 * that come and go, and checks that each entry, and the header of slot 1, are whole. The object id of slot 0 is the
 * epoch, and part of the steady keys; 0 between epochs.
 *
 * A read gives up after KVFS_READER_WAIT_NS. On a busy machine a living writer can be without a processor in mid-change
 * for as long, so that a read may give up a few times: what it must not do is answer something wrong.
 */
#include "shared/table_core.h"

#include <stdio.h>
#include <stdlib.h>

/* With KVFS_READER_WAIT_NS each: after ten seconds without an answer the writer is dead indeed. */
#define MAX_ATTEMPTS 100

static void make_key(uint8_t key[16], const char *name, uint64_t epoch, unsigned number) {
    memset(key, ' ', 16);
    memcpy(key, name, strlen(name));
    memcpy(key + 6, &epoch, 8);
    key[14] = (uint8_t)(number >> 8);
    key[15] = (uint8_t)number;
}

static int fail(const char *why) {
    puts(why);
    return 1;
}

static int lookup(const struct kvfs_table *table, const uint8_t key[16], struct kvfs_entry_view *view) {
    int rc = -ETIMEDOUT;
    for (int i = 0; i < MAX_ATTEMPTS && rc < 0; i++) rc = kvfs_table_lookup(table, key, view);
    return rc;
}

static int read_header(const struct kvfs_table *table, uint32_t slot, struct kvfs_slot_header *header) {
    int rc = -ETIMEDOUT;
    for (int i = 0; i < MAX_ATTEMPTS && rc < 0; i++) rc = kvfs_slot_header_read(table, slot, header);
    return rc;
}

static uint64_t epoch_now(const struct kvfs_table *table) {
    struct kvfs_slot_header header;
    return read_header(table, 0, &header) == 0 ? header.object_id : 0;
}

static const char *check(const struct kvfs_table *table, const char *name, unsigned number, int steady) {
    uint8_t key[16];
    struct kvfs_entry_view view;
    uint64_t tail, epoch = steady ? epoch_now(table) : 0;
    if (steady && epoch == 0) return NULL;
    make_key(key, name, epoch, number);
    int rc = lookup(table, key, &view);
    if (rc < 0) return "the writer seems dead";
    if (rc == 0) return steady && epoch_now(table) == epoch ? "a key that is there all the time was missed" : NULL;
    memcpy(&tail, key + 8, 8);
    tail = __builtin_bswap64(tail);
    if (view.size_bytes != ((uint64_t)view.slot << 32 | view.generation)) return "a torn entry";
    return view.location == (view.size_bytes ^ tail) ? NULL : "an entry of another key";
}

int main(int argc, char **argv) {
    struct kvfs_table table;
    struct kvfs_slot_header header;
    const char *why = "";
    if (argc != 4 || kvfs_table_attach(&table, argv[1], NULL, &why) != 0) return fail(why);
    unsigned steady = (unsigned)atoi(argv[2]), churn = (unsigned)atoi(argv[3]);
    unsigned long lookups = 0;
    puts("ready");
    fflush(stdout);
    while (kvfs_table_alive(&table)) {
        const char *wrong = NULL;
        for (unsigned i = 0; i < steady && !wrong; i++, lookups++) wrong = check(&table, "steady", i, 1);
        for (unsigned i = 0; i < churn && !wrong; i++, lookups++) wrong = check(&table, "churn", i, 0);
        for (unsigned i = 0; i < 20 && !wrong; i++) {
            if (read_header(&table, 1, &header) != 0)
                wrong = "the writer seems dead";
            else if (header.header_checksum != kvfs_slot_header_checksum(&header))
                wrong = "a torn slot header";
        }
        if (wrong) return fail(wrong);
    }
    kvfs_table_close(&table);
    puts(lookups > 5000 ? "done" : "too few lookups");
    return 0;
}

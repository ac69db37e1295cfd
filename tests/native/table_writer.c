/* A slow writer of the shared table, for the readers in table_reader.c to race with.
 *
 * table_writer TABLE STEADY CHURN MILLISECONDS: creates the table, then changes values, inserts, removes and moves
 * until the time is over, and marks the table dead. Each epoch begins with steady keys that stand behind others in
 * their runs, so that they move as those go. The test compiles the writer's code with a KVFS_STORE that
 * lingers after every store: an entry is one cache line, so at full speed a reader would hardly ever see half of it.
 */
#include "shared/table_core.h"

#include <stdio.h>
#include <stdlib.h>

#define CHANGES_PER_EPOCH 100

static void make_key(uint8_t key[16], const char *name, uint64_t epoch, unsigned number) {
    memset(key, ' ', 16);
    memcpy(key, name, strlen(name));
    memcpy(key + 6, &epoch, 8);
    key[14] = (uint8_t)(number >> 8);
    key[15] = (uint8_t)number;
}

static void put(struct kvfs_table *table, const char *name, uint64_t epoch, unsigned number, uint32_t generation) {
    uint8_t key[16];
    uint64_t tail;
    make_key(key, name, epoch, number);
    memcpy(&tail, key + 8, 8);
    uint64_t size = (uint64_t)number << 32 | generation;
    struct kvfs_entry_value value = {
        .slot = number, .generation = generation, .size_bytes = size, .kind = 2, .tiers = 1};
    value.location = size ^ __builtin_bswap64(tail);
    kvfs_table_put(table, key, &value);
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void set_header(struct kvfs_table *table, uint32_t slot, uint64_t value) {
    struct kvfs_slot_header header = {.state = KVFS_SLOT_SEALED, .generation = 2, .object_id = value};
    kvfs_slot_header_write(table, slot, &header);
}

static void run_epoch(struct kvfs_table *table, uint64_t epoch, unsigned steady, unsigned churn) {
    uint8_t key[16];
    for (unsigned i = 0; i < churn; i++) put(table, "churn", 0, i, 0);
    for (unsigned i = 0; i < steady; i++) put(table, "steady", epoch, i, 0);
    set_header(table, 0, epoch);
    for (uint32_t change = 1; change <= CHANGES_PER_EPOCH; change++) {
        unsigned number = (unsigned)rand() % churn;
        make_key(key, "churn", 0, number);
        if (!kvfs_table_remove(table, key)) put(table, "churn", 0, number, change);
        put(table, "steady", epoch, change % steady, change);
        set_header(table, 1, change);
    }
    set_header(table, 0, 0);
    for (unsigned i = 0; i < steady; i++) {
        make_key(key, "steady", epoch, i);
        kvfs_table_remove(table, key);
    }
}

int main(int argc, char **argv) {
    static const uint8_t store_id[16];
    struct kvfs_table table;
    if (argc != 5 || kvfs_table_create(&table, argv[1], store_id, 8, 256) != 0) return 1;
    set_header(&table, 0, 0);
    set_header(&table, 1, 0);
    puts("ready");
    fflush(stdout);
    getchar();
    int64_t until = now_ms() + atoi(argv[4]);
    srand(7);
    for (uint64_t epoch = 1; now_ms() < until; epoch++)
        run_epoch(&table, epoch, (unsigned)atoi(argv[2]), (unsigned)atoi(argv[3]));
    kvfs_table_set_dead(&table);
    puts("done");
    return 0;
}

/* A slow writer of the shared table, for the readers in table_reader.c to race with.
 *
 * table_writer TABLE STEADY CHURN MILLISECONDS: creates the table, then changes values, inserts, removes and moves
 * until the time is over, and marks the table dead. The test compiles the writer's code with a KVFS_STORE that
 * lingers after every store: an entry is one cache line, so at full speed a reader would hardly ever see half of it.
 */
#include "table_core.h"

#include <stdio.h>
#include <stdlib.h>

static void make_key(uint8_t key[16], const char *name, unsigned number)
{
    memset(key, ' ', 14);
    memcpy(key, name, strlen(name));
    key[14] = (uint8_t)(number >> 8);
    key[15] = (uint8_t)number;
}

static void put(struct kvfs_table *table, const char *name, unsigned number, uint32_t generation)
{
    uint8_t key[16];
    uint64_t tail;
    make_key(key, name, number);
    memcpy(&tail, key + 8, 8);
    uint64_t size = (uint64_t)number << 32 | generation;
    struct kvfs_entry_value value = {.slot = number, .generation = generation, .size_bytes = size, .kind = 2, .tiers = 1};
    value.location = size ^ __builtin_bswap64(tail);
    kvfs_table_put(table, key, &value);
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int main(int argc, char **argv)
{
    static const uint8_t store_id[16];
    struct kvfs_table table;
    struct kvfs_slot_header header = {.state = KVFS_SLOT_SEALED, .generation = 2};
    uint8_t key[16];
    if (argc != 5 || kvfs_table_create(&table, argv[1], store_id, 8, 256) != 0)
        return 1;
    unsigned steady = (unsigned)atoi(argv[2]), churn = (unsigned)atoi(argv[3]);
    kvfs_slot_header_write(&table, 0, &header);
    for (unsigned i = 0; i < steady; i++)
        put(&table, "steady", i, 0);
    puts("ready");
    fflush(stdout);
    getchar();
    int64_t until = now_ms() + atoi(argv[4]);
    srand(7);
    for (uint32_t change = 1; now_ms() < until; change++) {
        unsigned number = (unsigned)rand() % churn;
        make_key(key, "churn", number);
        if (!kvfs_table_remove(&table, key))
            put(&table, "churn", number, change);
        put(&table, "steady", change % steady, change);
        header.object_id = header.sequence = change;
        kvfs_slot_header_write(&table, 0, &header);
    }
    kvfs_table_set_dead(&table);
    puts("done");
    return 0;
}

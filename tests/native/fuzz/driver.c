/* A mutator for where libFuzzer is not: PROGRAM SECONDS SEED FILE... changes the files' bytes for so long. The seed is
 * printed; the same seed and files give the same inputs, one after the other.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define INPUT_BYTES 4096u
#define CORPUS 256
#define MAX_CHANGES 8

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct input {
    uint8_t data[INPUT_BYTES];
    size_t size;
};

static struct input corpus[CORPUS];
static uint64_t state;

static uint64_t next(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static void change(struct input *in, const struct input *other) {
    static const uint8_t telling[] = {0, 1, 0x7f, 0x80, 0xff, ' ', '%', '/', ':', '\r', '\n'};
    size_t at = in->size ? next(in->size) : 0, n = in->size ? 1 + next(in->size - at) : 0;
    switch (next(6)) {
    case 0:
        in->data[at] ^= (uint8_t)(1u << next(8));
        break;
    case 1:
        in->data[at] = telling[next(sizeof telling)];
        break;
    case 2:
        in->data[at] = (uint8_t)next(256);
        break;
    case 3: /* without some bytes */
        memmove(in->data + at, in->data + at + n, in->size - at - n);
        in->size -= n;
        break;
    case 4: /* some twice */
        n = n < INPUT_BYTES - in->size ? n : INPUT_BYTES - in->size;
        memmove(in->data + at + n, in->data + at, in->size - at);
        in->size += n;
        break;
    default: /* some of another's */
        n = n < other->size ? n : other->size;
        memcpy(in->data + at, other->data, n);
        break;
    }
}

static int read_file(const char *path, struct input *in) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) return 0;
    in->size = fread(in->data, 1, sizeof in->data, file);
    fclose(file);
    return 1;
}

int main(int argc, char **argv) {
    static struct input in;
    int files = 0;
    uint64_t inputs = 0;
    if (argc < 4) return 2;
    const time_t until = time(NULL) + atoi(argv[1]);
    state = strtoull(argv[2], NULL, 10);
    printf("seed %" PRIu64 "\n", state);
    fflush(stdout);
    state = state * 0x9E3779B97F4A7C15ull | 1;
    for (int i = 3; i < argc && files < CORPUS; i++) files += read_file(argv[i], &corpus[files]);
    for (int i = 0; i < files; i++, inputs++) LLVMFuzzerTestOneInput(corpus[i].data, corpus[i].size);
    for (; files > 0 && time(NULL) < until; inputs++) {
        in = corpus[next((uint64_t)files)];
        for (uint64_t changes = 1 + next(MAX_CHANGES); changes > 0; changes--)
            change(&in, &corpus[next((uint64_t)files)]);
        LLVMFuzzerTestOneInput(in.data, in.size);
    }
    printf("%" PRIu64 " inputs\n", inputs);
    return files == 0;
}

/* The S3 door's head parser against any bytes: what it takes lies inside of what it was given, and so do the addresses
 * and the canonical request that follow from it.
 */
#include <stdlib.h>
#include <string.h>

#include "s3/fast_path.h"

#define ROOM_BYTES 4096

static void check(int holds) {
    if (!holds) abort();
}

static int lies_in(struct kvfs_text text, const uint8_t *data, size_t size) {
    return text.at == NULL || (text.at >= data && text.size <= size && text.at + text.size <= data + size);
}

static struct kvfs_text text_of(const char *text) { return (struct kvfs_text){(const uint8_t *)text, strlen(text)}; }

static void verify(const struct kvfs_s3_head *head) {
    static struct kvfs_s3_signer signer;
    static const uint8_t key[32] = "a signing key of 32 bytes, fixed";
    uint8_t scratch[ROOM_BYTES];
    if (signer.count == 0) {
        check(kvfs_s3_signer_key(&signer, key) == 0);
        signer.scope = text_of("20260102/us-east-1/s3/aws4_request");
        signer.signed_headers = text_of("host;x-amz-content-sha256;x-amz-date");
        signer.names[signer.count++] = KVFS_S3_HOST;
        signer.names[signer.count++] = KVFS_S3_PAYLOAD;
        signer.names[signer.count++] = KVFS_S3_DATE;
    }
    for (size_t room = 0; room <= sizeof scratch; room = 2 * room + 1)
        kvfs_s3_verify(head, &signer, 1767323045.0, 900.0, scratch, room); /* of 20260102T030405Z */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct kvfs_s3_head head;
    uint8_t *copy = malloc(size ? size : 1), name[2048]; /* its end is the end of what may be read */
    memcpy(copy, data, size);
    if (kvfs_s3_parse(copy, size, &head)) {
        check(head.bytes <= size && head.signature.size == 64);
        check(lies_in(head.target, copy, size) && lies_in(head.signer, copy, size) &&
              lies_in(head.signature, copy, size));
        for (int i = 0; i < KVFS_S3_FIELDS; i++) check(lies_in(head.value[i], copy, size));
        for (size_t room = 1; room <= sizeof name; room *= 2) {
            check(kvfs_s3_name(head.target, (struct kvfs_text){NULL, 0}, name, room) <= room);
            check(kvfs_s3_name(head.target, text_of("bucket"), name, room) <= room);
        }
        verify(&head);
    }
    free(copy);
    return 0;
}

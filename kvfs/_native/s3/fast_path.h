/* Plain requests at the S3 door without Python: parsing a head, verifying its signature, answering a read.
 *
 * Responsibility: recognise plain signed GETs and HEADs of a key, and answer those whose bytes are in DRAM; recognise
 * PUTs of an unsigned payload with only a length and a CRC-64/NVME, with which gateway/app/fast_path.py goes on. All else
 * is "not ours": the general path in Python gets the same bytes from their beginning. So nothing is refused here, and a
 * request taken here means the same there (tests/gateway/http/test_fast_path.py).
 *
 * Invariants: a head is taken only if each of its fields is in the table of head.c, none twice, in printable
 * ASCII. A signature is verified for every request, in constant time. Nothing is sent unless the whole answer is
 * known: the slot is open and its generation did not move.
 *
 * Concurrency: pure functions over what they are given; one thread.
 */
#ifndef KVFS_S3_READS_CORE_H
#define KVFS_S3_READS_CORE_H

#include <stddef.h>
#include <stdint.h>

#include <openssl/types.h>

#include "shared/table_core.h"

struct kvfs_text {
    const uint8_t *at;
    size_t size;
};

enum kvfs_s3_method { KVFS_S3_GET, KVFS_S3_HEAD, KVFS_S3_PUT };

/* Fields that a plain request may have. */
enum kvfs_s3_field {
    KVFS_S3_HOST,
    KVFS_S3_AUTHORIZATION,
    KVFS_S3_DATE,    /* x-amz-date */
    KVFS_S3_PAYLOAD, /* x-amz-content-sha256 */
    KVFS_S3_CHECKSUM_MODE,
    KVFS_S3_CONNECTION,
    KVFS_S3_CONTENT_LENGTH, /* of a read: 0 */
    KVFS_S3_EXPECT,
    KVFS_S3_CRC64,     /* x-amz-checksum-crc64nvme */
    KVFS_S3_ALGORITHM, /* x-amz-sdk-checksum-algorithm */
    KVFS_S3_ACCEPT,
    KVFS_S3_ACCEPT_ENCODING,
    KVFS_S3_ACCEPT_LANGUAGE,
    KVFS_S3_CONTENT_TYPE,
    KVFS_S3_HTTP_DATE,
    KVFS_S3_SDK_INVOCATION,
    KVFS_S3_SDK_REQUEST,
    KVFS_S3_USER_AGENT,
    KVFS_S3_FIELDS
};

struct kvfs_s3_head {
    size_t bytes; /* with the empty line */
    enum kvfs_s3_method method;
    uint64_t length; /* of a PUT's body */
    struct kvfs_text target;
    struct kvfs_text value[KVFS_S3_FIELDS]; /* at NULL: not there */
    struct kvfs_text signer;                /* of the Authorization: all before the signature */
    struct kvfs_text signature;             /* 64 bytes */
};

#define KVFS_S3_SIGNED_MOST 16

/* What follows from a credential and the names that a client signs. */
struct kvfs_s3_signer {
    EVP_MD_CTX *sha256;
    EVP_MAC_CTX *hmac;      /* holds the signing key */
    struct kvfs_text scope; /* DATE/REGION/s3/aws4_request */
    struct kvfs_text signed_headers;
    uint32_t names[KVFS_S3_SIGNED_MOST];
    uint32_t count;
};

/* An object's row as its answer needs it. */
struct kvfs_s3_object {
    uint8_t key[KVFS_KEY_BYTES];
    uint64_t size_bytes;
    struct kvfs_text headers;  /* lines with CRLF */
    struct kvfs_text checksum; /* the same, for who asked for it */
};

/* What stands beside the object in an answer. */
struct kvfs_s3_answering {
    const struct kvfs_table *table;
    int dirfd;
    int socket;
    uint64_t request_id;
    struct kvfs_text date;
    uint64_t small_bytes; /* bodies up to this leave in one write with their headers */
    uint64_t chunk_bytes; /* sent of a larger one here */
    uint8_t *out;
    size_t room;
};

/* What the socket did not take: bytes of `out`, then of a descriptor, which is the caller's. */
struct kvfs_s3_rest {
    size_t from;
    size_t to;
    int fd; /* -1: nothing of a file */
    uint64_t offset;
    uint64_t left;
};

enum kvfs_s3_outcome {
    KVFS_S3_NOT_OURS = 0, /* nothing was sent */
    KVFS_S3_SENT = 1,
    KVFS_S3_PART = 2,
    KVFS_S3_GONE = 3, /* the client does not take answers any more */
};

/* The field's number, or -1. */
int kvfs_s3_field(const uint8_t *name, size_t size);
struct kvfs_text kvfs_s3_field_name(uint32_t field);
/* Returns 1, or 0 for a head that is incomplete or not ours. */
int kvfs_s3_parse(const uint8_t *data, size_t size, struct kvfs_s3_head *head);
/* "bucket \0 key" of a target into `name`: its length, or 0 for what is not ours. `host_bucket` has size 0 where the
 * path begins with the bucket. */
size_t kvfs_s3_name(struct kvfs_text target, struct kvfs_text host_bucket, uint8_t *name, size_t room);
/* Makes the contexts of a signing key: 0 or -ENOMEM. One thread at a time may verify with them. */
int kvfs_s3_signer_key(struct kvfs_s3_signer *signer, const uint8_t key[32]);
/* Also where nothing was made. */
void kvfs_s3_signer_free(struct kvfs_s3_signer *signer);
/* Whether the signature, its time and what must be signed are right. `scratch` holds the canonical request. */
int kvfs_s3_verify(const struct kvfs_s3_head *head, const struct kvfs_s3_signer *signer, double now_s, double skew_s,
                   uint8_t *scratch, size_t room);
/* An outcome. */
int kvfs_s3_answer(const struct kvfs_s3_answering *a, const struct kvfs_s3_head *head,
                   const struct kvfs_s3_object *object, struct kvfs_s3_rest *rest);

#endif

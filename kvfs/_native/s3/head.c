#include "fast_path.h"

#include <string.h>

/* Lower case, in the order of the enum. What is not here may mean something: the general path knows. */
static const struct {
    const char *name;
    size_t size;
} FIELDS[KVFS_S3_FIELDS] = {
#define FIELD(text) \
    { text, sizeof text - 1 }
    FIELD("host"),
    FIELD("authorization"),
    FIELD("x-amz-date"),
    FIELD("x-amz-content-sha256"),
    FIELD("x-amz-checksum-mode"),
    FIELD("connection"),
    FIELD("content-length"),
    FIELD("expect"),
    FIELD("x-amz-checksum-crc64nvme"),
    FIELD("x-amz-sdk-checksum-algorithm"),
    FIELD("accept"),
    FIELD("accept-encoding"),
    FIELD("accept-language"),
    FIELD("content-type"),
    FIELD("date"),
    FIELD("amz-sdk-invocation-id"),
    FIELD("amz-sdk-request"),
    FIELD("user-agent"),
#undef FIELD
};

static inline uint8_t lower(uint8_t c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; }

static int equals(struct kvfs_text text, const char *wanted) {
    size_t size = strlen(wanted);
    if (text.size != size) return 0;
    for (size_t i = 0; i < size; i++)
        if (lower(text.at[i]) != (uint8_t)wanted[i]) return 0;
    return 1;
}

int kvfs_s3_field(const uint8_t *name, size_t size) {
    for (int i = 0; i < KVFS_S3_FIELDS; i++)
        if (FIELDS[i].size == size && equals((struct kvfs_text){name, size}, FIELDS[i].name)) return i;
    return -1;
}

struct kvfs_text kvfs_s3_field_name(uint32_t field) {
    return (struct kvfs_text){(const uint8_t *)FIELDS[field].name, FIELDS[field].size};
}

/* The value between `at` and `end`, trimmed, if it is printable ASCII without two spaces in a row, which are signed as
 * one. Tabs, high bytes and stray CR or LF are not ours. */
static int take_value(const uint8_t *at, const uint8_t *end, struct kvfs_text *value) {
    while (at < end && *at == ' ') at++;
    while (end > at && end[-1] == ' ') end--;
    for (const uint8_t *c = at; c < end; c++)
        if (*c < 0x20 || *c > 0x7e || (*c == ' ' && c[1] == ' ')) return 0;
    *value = (struct kvfs_text){at, (size_t)(end - at)};
    return 1;
}

/* All before the signature, which is 64 hex digits at the very end. */
static int split_authorization(struct kvfs_s3_head *head) {
    static const char mark[] = "Signature=";
    const size_t tail = 64 + sizeof mark - 1;
    struct kvfs_text all = head->value[KVFS_S3_AUTHORIZATION];
    if (all.size <= tail || memcmp(all.at + all.size - tail, mark, sizeof mark - 1) != 0) return 0;
    head->signer = (struct kvfs_text){all.at, all.size - tail};
    head->signature = (struct kvfs_text){all.at + all.size - 64, 64};
    return 1;
}

static int is_exactly(struct kvfs_text text, const char *wanted) {
    return text.size == strlen(wanted) && memcmp(text.at, wanted, text.size) == 0;
}

static int payload_is_plain(struct kvfs_text payload) {
    if (payload.size == 16) return is_exactly(payload, "UNSIGNED-PAYLOAD");
    if (payload.size != 64) return 0;
    for (size_t i = 0; i < 64; i++)
        if (!((payload.at[i] >= '0' && payload.at[i] <= '9') || (payload.at[i] >= 'a' && payload.at[i] <= 'f')))
            return 0;
    return 1;
}

static int read_is_plain(const struct kvfs_text *value) {
    struct kvfs_text mode = value[KVFS_S3_CHECKSUM_MODE], length = value[KVFS_S3_CONTENT_LENGTH];
    if (value[KVFS_S3_EXPECT].at || value[KVFS_S3_CRC64].at || value[KVFS_S3_ALGORITHM].at) return 0;
    return (!length.at || is_exactly(length, "0")) && (!mode.at || is_exactly(mode, "ENABLED"));
}

/* A body of a known length without metadata: what else it might have is in fields that are not in the table. */
static int write_is_plain(struct kvfs_s3_head *head) {
    const struct kvfs_text *value = head->value;
    struct kvfs_text length = value[KVFS_S3_CONTENT_LENGTH], algorithm = value[KVFS_S3_ALGORITHM];
    if (value[KVFS_S3_CHECKSUM_MODE].at || value[KVFS_S3_CONTENT_TYPE].at || value[KVFS_S3_PAYLOAD].size != 16)
        return 0;
    if (value[KVFS_S3_EXPECT].at && !equals(value[KVFS_S3_EXPECT], "100-continue")) return 0;
    if (algorithm.at && (!is_exactly(algorithm, "CRC64NVME") || !value[KVFS_S3_CRC64].at)) return 0;
    if (length.size == 0 || length.size > 15) return 0;
    for (size_t i = 0; i < length.size; i++) {
        if (length.at[i] < '0' || length.at[i] > '9') return 0;
        head->length = 10 * head->length + length.at[i] - '0';
    }
    return head->length > 0;
}

/* Every field that must be there is, and those that are mean a plain request. */
static int is_plain(struct kvfs_s3_head *head) {
    const struct kvfs_text *value = head->value;
    if (!value[KVFS_S3_HOST].size || !value[KVFS_S3_AUTHORIZATION].at || !value[KVFS_S3_DATE].at) return 0;
    if (!value[KVFS_S3_PAYLOAD].at || !payload_is_plain(value[KVFS_S3_PAYLOAD])) return 0;
    if (value[KVFS_S3_CONNECTION].at && !equals(value[KVFS_S3_CONNECTION], "keep-alive")) return 0;
    int plain = head->method == KVFS_S3_PUT ? write_is_plain(head) : read_is_plain(value);
    return plain && split_authorization(head);
}

static const uint8_t *take_request_line(const uint8_t *at, const uint8_t *end, struct kvfs_s3_head *head) {
    static const char version[] = " HTTP/1.1";
    if (end - at > 5 && memcmp(at, "GET ", 4) == 0)
        at += 4, head->method = KVFS_S3_GET;
    else if (end - at > 6 && memcmp(at, "HEAD ", 5) == 0)
        at += 5, head->method = KVFS_S3_HEAD;
    else if (end - at > 5 && memcmp(at, "PUT ", 4) == 0)
        at += 4, head->method = KVFS_S3_PUT;
    else
        return NULL;
    const uint8_t *line = memchr(at, '\r', (size_t)(end - at));
    if (line == NULL || line[1] != '\n' || line - at < (long)sizeof version) return NULL;
    head->target = (struct kvfs_text){at, (size_t)(line - at) - (sizeof version - 1)};
    return memcmp(at + head->target.size, version, sizeof version - 1) == 0 ? line + 2 : NULL;
}

int kvfs_s3_parse(const uint8_t *data, size_t size, struct kvfs_s3_head *head) {
    const uint8_t *end = memmem(data, size, "\r\n\r\n", 4);
    if (end == NULL) return 0;
    memset(head, 0, sizeof *head);
    head->bytes = (size_t)(end - data) + 4;
    end += 2; /* after the last field's line */
    const uint8_t *at = take_request_line(data, end, head);
    while (at != NULL && at < end) {
        const uint8_t *line = memchr(at, '\r', (size_t)(end - at));
        const uint8_t *colon = memchr(at, ':', (size_t)(line - at));
        if (line[1] != '\n' || colon == NULL) return 0;
        int field = kvfs_s3_field(at, (size_t)(colon - at));
        if (field < 0 || head->value[field].at != NULL || !take_value(colon + 1, line, &head->value[field])) return 0;
        at = line + 2;
    }
    return at != NULL && is_plain(head);
}

/* --- the address ------------------------------------------------------------------------------------------- */
static inline int hex(uint8_t c) {
    if (c >= '0' && c <= '9') return c - '0';
    c = lower(c);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static inline int stands_for_itself(uint8_t c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           (c != 0 && strchr("-._~/!$&'()*+,;=:@", c) != NULL);
}

/* A key in printable ASCII, decoded once: its length, 0 for what is not ours. */
static size_t take_key(const uint8_t *at, const uint8_t *end, uint8_t *key, size_t room) {
    size_t size = 0;
    while (at < end) {
        uint8_t c = *at++;
        if (c == '%') {
            if (end - at < 2 || hex(at[0]) < 0 || hex(at[1]) < 0) return 0;
            c = (uint8_t)(hex(at[0]) << 4 | hex(at[1]));
            at += 2;
            if (c < 0x20 || c > 0x7e) return 0;
        } else if (!stands_for_itself(c)) {
            return 0;
        }
        if (size == room) return 0;
        key[size++] = c;
    }
    return size > 0 && key[size - 1] != '/' ? size : 0; /* a directory's marker has its body in the index */
}

size_t kvfs_s3_name(struct kvfs_text target, struct kvfs_text host_bucket, uint8_t *name, size_t room) {
    const uint8_t *at = target.at + 1, *end = target.at + target.size;
    struct kvfs_text bucket = host_bucket;
    if (target.size < 2 || target.at[0] != '/') return 0;
    if (bucket.size == 0) {
        const uint8_t *slash = memchr(at, '/', (size_t)(end - at));
        if (slash == NULL) return 0;
        bucket = (struct kvfs_text){at, (size_t)(slash - at)};
        at = slash + 1;
    }
    if (bucket.size == 0 || bucket.size + 1 >= room || bucket.at[0] == '.') return 0;
    for (size_t i = 0; i < bucket.size; i++)
        if (bucket.at[i] == '%' || bucket.at[i] == '/' || !stands_for_itself(bucket.at[i])) return 0;
    memcpy(name, bucket.at, bucket.size);
    name[bucket.size] = 0;
    size_t key = take_key(at, end, name + bucket.size + 1, room - bucket.size - 1);
    return key == 0 ? 0 : bucket.size + 1 + key;
}

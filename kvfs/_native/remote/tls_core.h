/* Sessions of TLS between machines. See tls_core.c. */
#ifndef KVFS_REMOTE_TLS_CORE_H
#define KVFS_REMOTE_TLS_CORE_H

#include <openssl/types.h>
#include <stddef.h>
#include <stdint.h>

#include "remote/channel.h"

#define KVFS_TLS_REASON_BYTES 160

struct kvfs_tls_bytes {
    uint8_t *data;
    size_t room, begin, end;
};

struct kvfs_tls {
    struct kvfs_session session; /* first: a channel has this */
    SSL *ssl;
    int fd;        /* the channel's */
    int error;     /* what the socket failed with, an errno */
    int ended;     /* the peer has ended the stream */
    int failed;    /* the session is of no use: -errno of the first call that said so */
    size_t taken;  /* of the data of the call before: encrypted, and not sent yet */
    size_t idle;   /* bytes that came since the last that were data */
    uint64_t sent; /* data, under the keys that it has; new ones are taken after `key_bytes` */
    uint64_t key_bytes;
    struct kvfs_tls_bytes in, out;      /* encrypted */
    char reason[KVFS_TLS_REASON_BYTES]; /* why the session failed */
};

/* Which of the three files is wrong, by its place here from 1 on, and why; else 0 and the context. -1: none of them. */
int kvfs_tls_context(const char *certificate, const char *key, const char *authorities, SSL_CTX **context,
                     char *reason);
void kvfs_tls_context_free(SSL_CTX *context);
/* Until when the certificate counts, in seconds since 1970; 0 where it does not say. */
int64_t kvfs_tls_ends_s(const SSL_CTX *context);
/* A session over a connected socket, which stays the caller's, in the role of the one that serves or asks; NULL without
 * memory. */
struct kvfs_tls *kvfs_tls_open(SSL_CTX *context, int fd, int serves, uint64_t key_bytes);
/* 0 once both sides have shown their certificates, else -errno: -EAGAIN, or -EKEYREJECTED for a certificate. */
int kvfs_tls_handshake(struct kvfs_tls *t);
ssize_t kvfs_tls_send(struct kvfs_session *s, const void *data, size_t bytes, int flags);
ssize_t kvfs_tls_receive(struct kvfs_session *s, void *into, size_t bytes);
void kvfs_tls_free(struct kvfs_session *s);

#endif

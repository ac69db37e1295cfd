/* TLS 1.3 between machines, each of which shows a certificate that the cluster's authority has signed.
 *
 * Responsibility: one context for all connections, and sessions as channels want them (channel.h). OpenSSL encrypts; the
 * socket's bytes are moved here, below it: through a buffer for each direction, so that a system call moves four records
 * and not one (kTLS would spare that, and few kernels have it), and with MSG_NOSIGNAL.
 *
 * Invariants:
 * - No call blocks. What would is -EAGAIN, with what to wait for in `wants`.
 * - Whoever has a certificate of the authority is let in, whatever name it has: what proves a machine is the secret, which
 *   is exchanged inside. No other authority counts, the system's neither. Nothing is resumed: no tickets, no cache.
 * - An end without TLS's own is an end like any other: every message has its length, so nothing is cut short unseen.
 * - A peer that sends bytes which are no data, records without any or new keys, is cut off after IDLE_BYTES of them.
 * - `outcome` alone says what a failed call of OpenSSL means. Its queue of errors is empty before and after each call.
 *
 * Concurrency: one thread at a time for each session; a context is for all threads.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "tls_core.h"

#include <errno.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/sslerr.h>
#include <openssl/x509.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

/* Encrypted at once. */
#define PIECE_BYTES ((size_t)64 << 10)
/* A piece, and what is before it with MSG_MORE, with what TLS adds to each record. */
#define OUT_BYTES (PIECE_BYTES + ((size_t)8 << 10))
#define IN_BYTES ((size_t)64 << 10)
/* Whoever serves receives requests alone: a record and a half. */
#define SERVED_IN_BYTES ((size_t)24 << 10)
/* More than the longest chain of certificates that OpenSSL takes. */
#define IDLE_BYTES ((size_t)160 << 10)

/* --- the socket's side ------------------------------------------------------------------------------------------- */
/* Sends what is encrypted: 0, or -errno. */
static int flush(struct kvfs_tls *t) {
    struct kvfs_tls_bytes *out = &t->out;
    while (out->begin < out->end) {
        const ssize_t put = send(t->fd, out->data + out->begin, out->end - out->begin, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (put >= 0) {
            out->begin += (size_t)put;
        } else if (errno == EAGAIN) {
            t->session.wants = POLLOUT;
            return -EAGAIN;
        } else if (errno != EINTR) {
            t->error = errno;
            return -errno;
        }
    }
    out->begin = out->end = 0;
    return 0;
}

/* Takes what OpenSSL has encrypted, and sends it only where there is no room. */
static int bio_write(BIO *bio, const char *data, int bytes) {
    struct kvfs_tls *t = (struct kvfs_tls *)BIO_get_data(bio);
    struct kvfs_tls_bytes *out = &t->out;
    BIO_clear_retry_flags(bio);
    if (out->room - out->end < (size_t)bytes) {
        const int rc = flush(t);
        if (rc < 0 && rc != -EAGAIN) return -1;
        memmove(out->data, out->data + out->begin, out->end - out->begin);
        out->end -= out->begin;
        out->begin = 0;
    }
    const size_t left = out->room - out->end, taken = left < (size_t)bytes ? left : (size_t)bytes;
    if (taken == 0) {
        BIO_set_retry_write(bio);
        return -1;
    }
    memcpy(out->data + out->end, data, taken);
    out->end += taken;
    return (int)taken;
}

/* 1 where bytes were received, 0 at the end, -1 with `error`, or with 0 in it where nothing is there yet. */
static int refill(struct kvfs_tls *t) {
    ssize_t got;
    t->error = t->idle > IDLE_BYTES ? EPROTO : 0;
    if (t->error) return -1;
    while ((got = recv(t->fd, t->in.data, t->in.room, MSG_DONTWAIT)) < 0 && errno == EINTR)
        ;
    if (got < 0) {
        t->error = errno == EAGAIN ? 0 : errno;
        return -1;
    }
    t->ended = got == 0;
    t->in.begin = 0;
    t->in.end = (size_t)got;
    t->idle += (size_t)got;
    return got > 0;
}

static int bio_read(BIO *bio, char *into, int bytes) {
    struct kvfs_tls *t = (struct kvfs_tls *)BIO_get_data(bio);
    struct kvfs_tls_bytes *in = &t->in;
    BIO_clear_retry_flags(bio);
    if (in->begin == in->end) {
        const int rc = refill(t);
        if (rc < 0 && t->error == 0) BIO_set_retry_read(bio);
        if (rc <= 0) return rc;
    }
    const size_t left = in->end - in->begin, given = left < (size_t)bytes ? left : (size_t)bytes;
    memcpy(into, in->data + in->begin, given);
    in->begin += given;
    return (int)given;
}

static long bio_control(BIO *bio, int command, long number, void *pointer) {
    const struct kvfs_tls *t = (const struct kvfs_tls *)BIO_get_data(bio);
    (void)number;
    (void)pointer;
    if (command == BIO_CTRL_EOF) return t->ended;
    return command == BIO_CTRL_FLUSH; /* done behind each call */
}

/* Made with the first context, by the one thread that makes contexts. */
static BIO_METHOD *method;

static int make_method(void) {
    if (method != NULL) return 1;
    method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvfs channel");
    return method != NULL && BIO_meth_set_write(method, bio_write) && BIO_meth_set_read(method, bio_read) &&
           BIO_meth_set_ctrl(method, bio_control);
}

/* --- what failed ------------------------------------------------------------------------------------------------- */
static void note(char *reason, const char *prefix, const char *text) {
    (void)snprintf(reason, KVFS_TLS_REASON_BYTES, "%s%s", prefix, text != NULL ? text : "it cannot be used");
}

/* -EKEYREJECTED where the peer's certificate is the reason, else -EPROTO. */
static int rejected(struct kvfs_tls *t) {
    const unsigned long error = ERR_peek_last_error(); /* those before it say what it was made of */
    const int reason = ERR_GET_REASON(error);
    const long verified = SSL_get_verify_result(t->ssl);
    if (reason == SSL_R_CERTIFICATE_VERIFY_FAILED || reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE) {
        if (verified != X509_V_OK)
            note(t->reason, "its certificate: ", X509_verify_cert_error_string(verified));
        else
            note(t->reason, "it has no certificate", "");
        return -EKEYREJECTED;
    }
    if (reason >= SSL_AD_REASON_OFFSET && reason < SSL_AD_REASON_OFFSET + 256)
        note(t->reason, "it refuses this machine: ", ERR_reason_error_string(error));
    else if (reason == SSL_R_WRONG_VERSION_NUMBER)
        note(t->reason, "it does not speak TLS", "");
    else
        note(t->reason, "", ERR_reason_error_string(error));
    return -EPROTO;
}

/* 0 at the end of the stream, or -errno. */
static int outcome(struct kvfs_tls *t, int rc) {
    const int what = SSL_get_error(t->ssl, rc);
    int found;
    t->session.wants = what == SSL_ERROR_WANT_WRITE ? POLLOUT : POLLIN;
    if (what == SSL_ERROR_WANT_READ || what == SSL_ERROR_WANT_WRITE) {
        found = -EAGAIN;
    } else if (what == SSL_ERROR_ZERO_RETURN) {
        found = 0;
    } else if (what == SSL_ERROR_SYSCALL) {
        found = t->error ? -t->error : -ECONNRESET;
        note(t->reason, "", found == -EPROTO ? "it sends no data" : "the connection ended");
    } else {
        found = rejected(t);
    }
    if (found != -EAGAIN) t->failed = found;
    ERR_clear_error();
    return found;
}

/* --- a channel's calls ------------------------------------------------------------------------------------------- */
/* Says so with the next record, and not by itself: an idle peer takes whatever comes for the end. */
static void renew_keys(struct kvfs_tls *t) {
    if (t->sent >= t->key_bytes && SSL_key_update(t->ssl, SSL_KEY_UPDATE_NOT_REQUESTED) == 1) t->sent = 0;
}

ssize_t kvfs_tls_send(struct kvfs_session *s, const void *data, size_t bytes, int flags) {
    struct kvfs_tls *t = (struct kvfs_tls *)s;
    const size_t most = bytes < PIECE_BYTES ? bytes : PIECE_BYTES;
    if (t->failed) return t->failed;
    const int is_begun = t->taken > 0;
    int rc = 1;
    ERR_clear_error();
    if (!is_begun) renew_keys(t);
    while (!is_begun && t->taken < most) {
        size_t put = 0;
        ERR_clear_error();
        rc = SSL_write_ex(t->ssl, (const uint8_t *)data + t->taken, most - t->taken, &put);
        if (rc != 1) break;
        t->taken += put;
    }
    if (t->taken == 0) return rc == 1 ? 0 : outcome(t, rc) ?: -EPIPE;
    if (!(flags & MSG_MORE)) {
        rc = flush(t);
        if (rc < 0) return rc;
    }
    const size_t sent = t->taken;
    t->taken = 0;
    t->sent += sent;
    return (ssize_t)sent;
}

ssize_t kvfs_tls_receive(struct kvfs_session *s, void *into, size_t bytes) {
    struct kvfs_tls *t = (struct kvfs_tls *)s;
    size_t total = 0;
    int rc = t->failed;
    while (rc == 0 && total < bytes) {
        size_t got = 0;
        ERR_clear_error();
        const int read = SSL_read_ex(t->ssl, (uint8_t *)into + total, bytes - total, &got);
        if (read != 1) {
            rc = outcome(t, read);
            break; /* 0 is the end */
        }
        t->idle = 0;
        total += got;
    }
    const short wants = t->session.wants;
    (void)flush(t); /* what OpenSSL answers by itself: new keys, an alert */
    t->session.wants = wants;
    return total > 0 ? (ssize_t)total : rc;
}

static int has_bytes(const struct kvfs_session *s) {
    const struct kvfs_tls *t = (const struct kvfs_tls *)s;
    return t->in.begin < t->in.end || SSL_pending(t->ssl) > 0;
}

void kvfs_tls_free(struct kvfs_session *s) {
    struct kvfs_tls *t = (struct kvfs_tls *)s;
    SSL_free(t->ssl);
    free(t->in.data);
    free(t->out.data);
    free(t);
}

static const struct kvfs_session_calls CALLS = {kvfs_tls_send, kvfs_tls_receive, has_bytes, kvfs_tls_free};

/* --- contexts and handshakes ------------------------------------------------------------------------------------- */
/* A key with a passphrase is refused: nobody is there to ask. */
static int no_passphrase(char *into, int room, int writes, void *of) {
    (void)into;
    (void)room;
    (void)writes;
    (void)of;
    return 0;
}

static int load(SSL_CTX *c, const char *certificate, const char *key, const char *authorities) {
    if (SSL_CTX_use_certificate_chain_file(c, certificate) != 1) return 1;
    if (SSL_CTX_use_PrivateKey_file(c, key, SSL_FILETYPE_PEM) != 1) return 2;
    return SSL_CTX_load_verify_file(c, authorities) == 1 ? 0 : 3;
}

static int prepare(SSL_CTX *c) {
    SSL_CTX_set_options(c, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET |
                               SSL_OP_IGNORE_UNEXPECTED_EOF);
    SSL_CTX_set_mode(c, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_session_cache_mode(c, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_verify(c, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    SSL_CTX_set_default_passwd_cb(c, no_passphrase);
    return SSL_CTX_set_min_proto_version(c, TLS1_3_VERSION) == 1 && SSL_CTX_set_num_tickets(c, 0) == 1;
}

int kvfs_tls_context(const char *certificate, const char *key, const char *authorities, SSL_CTX **context,
                     char *reason) {
    ERR_clear_error();
    SSL_CTX *c = make_method() ? SSL_CTX_new(TLS_method()) : NULL;
    const int wrong = c == NULL || !prepare(c) ? -1 : load(c, certificate, key, authorities);
    if (wrong != 0) {
        note(reason, "", ERR_reason_error_string(ERR_peek_error()));
        SSL_CTX_free(c);
    }
    ERR_clear_error();
    *context = wrong == 0 ? c : NULL;
    return wrong;
}

void kvfs_tls_context_free(SSL_CTX *context) { SSL_CTX_free(context); }

int64_t kvfs_tls_ends_s(const SSL_CTX *context) {
    struct tm at;
    if (ASN1_TIME_to_tm(X509_get0_notAfter(SSL_CTX_get0_certificate(context)), &at) != 1) return 0;
    return timegm(&at);
}

struct kvfs_tls *kvfs_tls_open(SSL_CTX *context, int fd, int serves, uint64_t key_bytes) {
    struct kvfs_tls *t = calloc(1, sizeof *t);
    if (t == NULL) return NULL;
    t->session.calls = &CALLS;
    t->fd = fd;
    t->key_bytes = key_bytes;
    t->in.room = serves ? SERVED_IN_BYTES : IN_BYTES;
    t->out.room = OUT_BYTES;
    t->in.data = malloc(t->in.room);
    t->out.data = malloc(t->out.room);
    t->ssl = SSL_new(context);
    BIO *bio = BIO_new(method);
    if (t->in.data == NULL || t->out.data == NULL || t->ssl == NULL || bio == NULL) {
        BIO_free(bio);
        kvfs_tls_free(&t->session);
        return NULL;
    }
    BIO_set_data(bio, t);
    BIO_set_init(bio, 1);
    SSL_set_bio(t->ssl, bio, bio);
    if (serves)
        SSL_set_accept_state(t->ssl);
    else
        SSL_set_connect_state(t->ssl);
    return t;
}

int kvfs_tls_handshake(struct kvfs_tls *t) {
    ERR_clear_error();
    const int rc = SSL_do_handshake(t->ssl);
    const int found = rc == 1 ? 0 : outcome(t, rc) ?: -ECONNRESET;
    const short wants = t->session.wants;
    const int flushed = flush(t); /* an alert, too */
    if (flushed < 0 && found == 0) return flushed;
    /* The peer answers what was sent: nothing is to be read before that has gone. */
    if (flushed == 0) t->session.wants = wants;
    return found;
}

/* Mutexes, conditions and threads, and what they guard.
 *
 * Responsibility: POSIX's own, under names that clang's thread-safety analysis knows. GUARDED_BY stands behind a field,
 * REQUIRES behind a function that is called with the mutex held. `make annotations` checks both, as C++, since in C an
 * attribute of a field cannot name another field; for every other compilation the macros are empty.
 *
 * Concurrency: any thread.
 */
#ifndef KVFS_MUTEX_H
#define KVFS_MUTEX_H

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#if defined(__cplusplus) && defined(__clang__)
#define KVFS_ATTRIBUTE(x) __attribute__((x))
/* C++ converts no void pointer by itself. */
struct kvfs_allocated {
    void *at;
    template <typename T> operator T *() const { return static_cast<T *>(at); }
};
#define malloc(bytes) (kvfs_allocated{malloc(bytes)})
#define calloc(count, bytes) (kvfs_allocated{calloc(count, bytes)})
#else
#define KVFS_ATTRIBUTE(x)
#endif

#define CAPABILITY(name) KVFS_ATTRIBUTE(capability(name))
#define GUARDED_BY(mutex) KVFS_ATTRIBUTE(guarded_by(mutex))
#define REQUIRES(...) KVFS_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) KVFS_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) KVFS_ATTRIBUTE(release_capability(__VA_ARGS__))
#define UNCHECKED KVFS_ATTRIBUTE(no_thread_safety_analysis) /* with the reason beside it */

struct CAPABILITY("mutex") kvfs_mutex {
    pthread_mutex_t raw;
};

#define KVFS_MUTEX_INITIALIZER \
    { PTHREAD_MUTEX_INITIALIZER }

static inline int kvfs_mutex_init(struct kvfs_mutex *m) { return pthread_mutex_init(&m->raw, NULL); }
static inline void kvfs_mutex_destroy(struct kvfs_mutex *m) { pthread_mutex_destroy(&m->raw); }

/* UNCHECKED, these four: they are what the analysis builds on. */
static inline void kvfs_lock(struct kvfs_mutex *m) ACQUIRE(*m) UNCHECKED { pthread_mutex_lock(&m->raw); }
static inline void kvfs_unlock(struct kvfs_mutex *m) RELEASE(*m) UNCHECKED { pthread_mutex_unlock(&m->raw); }
static inline void kvfs_wait(pthread_cond_t *condition, struct kvfs_mutex *m) REQUIRES(*m) UNCHECKED {
    pthread_cond_wait(condition, &m->raw);
}
/* `condition` is from kvfs_cond_init. 0, or -ETIMEDOUT. */
static inline int kvfs_wait_until(pthread_cond_t *condition, struct kvfs_mutex *m, const struct timespec *deadline)
    REQUIRES(*m) UNCHECKED {
    return -pthread_cond_timedwait(condition, &m->raw, deadline);
}

static inline int64_t kvfs_clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* For conditions whose waits end by the monotonic clock. */
static inline void kvfs_cond_init(pthread_cond_t *condition) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

static inline struct timespec kvfs_deadline_after(int64_t timeout_ns) {
    const int64_t at = kvfs_clock_ns(CLOCK_MONOTONIC) + timeout_ns;
    return (struct timespec){.tv_sec = at / 1000000000ll, .tv_nsec = at % 1000000000ll};
}

/* The stack of a thread of which there may be hundreds: those that serve sessions and peers. */
#define KVFS_SMALL_STACK_BYTES ((size_t)256 << 10)

/* A thread that takes no signals: those stay with the application's. `stack_bytes` 0: as usual. 0, or -errno. */
static inline int kvfs_thread_start(pthread_t *thread, void *(*run)(void *), void *argument, size_t stack_bytes) {
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (stack_bytes) pthread_attr_setstacksize(&attributes, stack_bytes);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int rc = pthread_create(thread, &attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return -rc;
}

#endif

/* Processors that do not halt between the requests of a burst. See state.h.
 *
 * A processor of a virtual machine halts where it has nothing to run, and to wake a thread on it takes 30 to 60 us: twice
 * for each request, for the reader and for its caller. So one thread for each processor spins during a burst, as
 * SCHED_IDLE: whoever else is woken there runs at once. On machines of more than FL_AWAKE_CPUS there are none: nobody
 * knows which processors the callers will be on.
 */
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "state.h"

#define AWAKE_NS 200000 /* after the last request of a burst */

/* Leaves the thread on one of the process's processors, the `number`-th, with what time is left there. 0, or -1. */
static int settle_on(int number) {
    const struct sched_param none = {0};
    cpu_set_t all, one;
    int cpu = 0;
    if (sched_setscheduler(0, SCHED_IDLE, &none) != 0 || sched_getaffinity(0, sizeof all, &all) != 0) return -1;
    while (cpu < CPU_SETSIZE && !(CPU_ISSET(cpu, &all) && number-- == 0)) cpu++;
    CPU_ZERO(&one);
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &one);
    return sched_setaffinity(0, sizeof one, &one);
}

static int is_over(struct fuse_loop *loop) {
    return kvfs_clock_ns(CLOCK_MONOTONIC) > __atomic_load_n(&loop->awake_until_ns, __ATOMIC_SEQ_CST);
}

/* While a thread watches for calls, three threads share two processors, and the scheduler at times prefers this one to
 * one that has just run, or has yielded, until the next tick, some 4 ms, however little time it is due: so it yields.
 * Else each processor has one of two threads: woken there, it runs after 11 us, and after 15 while this one yields. */
static void spin(struct fuse_loop *loop) {
    while (!is_over(loop)) {
        if (__atomic_load_n(&loop->watcher_cpu, __ATOMIC_RELAXED) != 0) sched_yield();
        for (int i = 0; i < 32; i++) {
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#else
            __asm__ volatile("" ::: "memory");
#endif
        }
    }
}

/* No mutex and no condition: whoever has the lock of one, or is woken by the other, may be one of these threads, which get
 * a processor seconds later where others use them up. A request waited 0.8 s for that. */
static void wake_all(struct fuse_loop *loop) {
    __atomic_fetch_add(&loop->awake_round, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &loop->awake_round, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static int is_stopping(struct fuse_loop *loop) { return __atomic_load_n(&loop->awake_stop, __ATOMIC_SEQ_CST); }

static void *stay_awake(void *argument) {
    struct fuse_loop *loop = (struct fuse_loop *)argument;
    int stays = settle_on(__atomic_fetch_add(&loop->awake_threads, 1, __ATOMIC_RELAXED)) == 0;
    while (stays && !is_stopping(loop)) {
        __atomic_fetch_add(&loop->asleep, 1, __ATOMIC_SEQ_CST);
        for (;;) {
            uint32_t round = __atomic_load_n(&loop->awake_round, __ATOMIC_SEQ_CST);
            if (!is_over(loop) || is_stopping(loop)) break;
            syscall(SYS_futex, &loop->awake_round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
        }
        __atomic_fetch_sub(&loop->asleep, 1, __ATOMIC_SEQ_CST);
        spin(loop);
    }
    return NULL;
}

void fl_awake_start(struct fuse_loop *loop) {
    int known = sched_getaffinity(0, sizeof loop->processors, &loop->processors) == 0;
    int count = known ? CPU_COUNT(&loop->processors) : 0;
    loop->avoids_watcher = count > 1 && count <= FL_AWAKE_CPUS;
    for (int i = 0; i < count && loop->avoids_watcher; i++)
        if (fl_thread_add(loop, stay_awake, loop) < 0) return;
}

void fl_awake_stop(struct fuse_loop *loop) {
    __atomic_store_n(&loop->awake_stop, 1, __ATOMIC_SEQ_CST);
    wake_all(loop);
}

static void keep_awake(struct fuse_loop *loop, int64_t now_ns) {
    __atomic_store_n(&loop->awake_until_ns, now_ns + AWAKE_NS, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&loop->asleep, __ATOMIC_SEQ_CST) != 0) wake_all(loop);
}

/* --- where the reader is ------------------------------------------------------------------------------ */

/* A thread that watches for calls takes a processor of its own; a reader beside it would be woken across processors for
 * each request, and so would the caller for each answer: 10 to 15 us each, even where none halts. Elsewhere it is with
 * its caller. */
void fl_note_watcher(struct fuse_loop *loop, int watches) {
    __atomic_store_n(&loop->watcher_cpu, watches && loop->avoids_watcher ? sched_getcpu() + 1 : 0, __ATOMIC_RELEASE);
}

static void avoid_watcher(struct fl_server *server) {
    struct fuse_loop *loop = server->loop;
    int cpu = __atomic_load_n(&loop->watcher_cpu, __ATOMIC_ACQUIRE);
    if (cpu == server->avoided_cpu) return;
    cpu_set_t others = loop->processors;
    if (cpu != 0) CPU_CLR(cpu - 1, &others);
    if (CPU_COUNT(&others) != 0) sched_setaffinity(0, sizeof others, &others);
    server->avoided_cpu = cpu;
}

void fl_note_idle(struct fl_server *server) {
    if (server->idle_since_ns == 0) server->idle_since_ns = kvfs_clock_ns(CLOCK_MONOTONIC);
    avoid_watcher(server);
}

void fl_note_request(struct fl_server *server) {
    int64_t now_ns = kvfs_clock_ns(CLOCK_MONOTONIC);
    if (server->idle_since_ns == 0 || now_ns - server->idle_since_ns < AWAKE_NS) keep_awake(server->loop, now_ns);
    server->idle_since_ns = 0;
}

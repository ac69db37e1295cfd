/* Faults that tests ask for. One lock; a call counts where its name is in the list. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define MOST 32

static struct fault {
    char name[64], value[64];
    long nth, calls;
} faults[MOST];
static int count;
static CUresult sticky;
static long life;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((visibility("default"))) void standin_faults(const char *spec) {
    char copy[2048], *rest = copy;
    snprintf(copy, sizeof(copy), "%s", spec ? spec : "");
    standin_await_runs();
    pthread_mutex_lock(&lock);
    count = 0;
    life += sticky != 0;
    sticky = 0;
    for (char *one; count < MOST && (one = strsep(&rest, ","));) {
        struct fault *f = &faults[count];
        memset(f, 0, sizeof(*f));
        if (sscanf(one, "%63[^:]:%63[^:]:%ld", f->name, f->value, &f->nth) == 3) count++;
    }
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void from_environment(void) { standin_faults(getenv("KVFS_STANDIN_FAULTS")); }

static CUresult count_call(const char *name) {
    CUresult result = 0;
    for (int i = 0; i < count; i++) {
        struct fault *f = &faults[i];
        if (strcmp(f->name, name) == 0 && (++f->calls == f->nth || f->nth == 0)) result = atoi(f->value);
    }
    return result;
}

CUresult standin_fault(const char *name) {
    pthread_mutex_lock(&lock);
    CUresult result = count_call(name);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult standin_sticky(void) {
    pthread_mutex_lock(&lock);
    CUresult result = count_call("sticky");
    if (!sticky) sticky = result;
    result = sticky;
    pthread_mutex_unlock(&lock);
    return result;
}

long standin_life(void) {
    pthread_mutex_lock(&lock);
    long now = life;
    pthread_mutex_unlock(&lock);
    return now;
}

void standin_break(CUresult result) {
    pthread_mutex_lock(&lock);
    if (!sticky) sticky = result;
    pthread_mutex_unlock(&lock);
}

static const struct fault *listed(const char *kind, const char *value) {
    for (int i = 0; i < count; i++)
        if (strcmp(faults[i].name, kind) == 0 && strcmp(faults[i].value, value) == 0) return &faults[i];
    return NULL;
}

int standin_is_missing(const char *name) { return listed("missing", name) != NULL; }

int standin_attribute(int number, int value) {
    char text[16];
    snprintf(text, sizeof(text), "%d", number);
    const struct fault *f = listed("attribute", text);
    return f ? (int)f->nth : value;
}

/* A stand-in for NVML, for tests alone. What it says is in the file that the environment's KVFS_STANDIN_NVML names, which
 * each call reads: `process UUID PID`, `shared UUID PID` by MPS, `result FUNCTION NUMBER`, `wait FIFO`: lists wait for a
 * writer to end. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define DEVICES 2

enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

struct process {
    unsigned int pid;
    unsigned long long used_bytes;
    unsigned int gpu_instance, compute_instance;
};

static const char *const uuids[DEVICES] = {"GPU-abababab-abab-abab-abab-ababababab00",
                                           "GPU-abababab-abab-abab-abab-ababababab01"};
static int initialised;

static FILE *state(void) {
    const char *path = getenv("KVFS_STANDIN_NVML");
    return path ? fopen(path, "re") : NULL;
}

static int result_of(const char *function) {
    char name[128];
    int number, result = SUCCESS;
    char line[256];
    FILE *file = state();
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "result %127s %d", name, &number) == 2 && strcmp(name, function) == 0) result = number;
    if (file) fclose(file);
    return result;
}

static void await_writer(void) {
    char line[4096], path[4000];
    FILE *file = state();
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "wait %3999s", path) == 1) {
            int fd = open(path, O_RDONLY | O_CLOEXEC);
            char byte;
            while (fd >= 0 && read(fd, &byte, 1) > 0)
                ;
            close(fd);
        }
    if (file) fclose(file);
}

EXPORT const char *nvmlErrorString(int result) {
    switch (result) {
    case UNINITIALIZED:
        return "Uninitialized";
    case 3:
        return "Not Supported";
    case 4:
        return "Insufficient Permissions";
    case NOT_FOUND:
        return "Not Found";
    case INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case 15:
        return "GPU is lost";
    default:
        return "Unknown Error";
    }
}

EXPORT int nvmlInit_v2(void) {
    int result = result_of("nvmlInit_v2");
    initialised += result == SUCCESS;
    return result;
}

EXPORT int nvmlShutdown(void) {
    if (!initialised) return UNINITIALIZED;
    initialised--;
    return result_of("nvmlShutdown");
}

EXPORT int standin_initialised(void) { return initialised; }

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    int result = initialised ? result_of("nvmlDeviceGetHandleByUUID") : UNINITIALIZED;
    if (result) return result;
    for (int i = 0; i < DEVICES; i++)
        if (strcmp(uuids[i], uuid) == 0) {
            *handle = (void *)uuids[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

static int list(const char *function, const char *kind, const char *device, unsigned int *count,
                struct process *table) {
    unsigned int room = *count, pid;
    char line[256], format[64], uuid[128];
    int result = initialised ? result_of(function) : UNINITIALIZED;
    if (result) return result;
    await_writer();
    FILE *file = state();
    *count = 0;
    snprintf(format, sizeof(format), "%s %%127s %%u", kind);
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, format, uuid, &pid) == 2 && strcmp(uuid, device) == 0) {
            if (*count < room) table[*count] = (struct process){.pid = pid, .used_bytes = 1 << 20};
            ++*count;
        }
    if (file) fclose(file);
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, struct process *table) {
    return list(__func__, "process", handle, count, table);
}

EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned int *count, struct process *table) {
    return list(__func__, "shared", handle, count, table);
}

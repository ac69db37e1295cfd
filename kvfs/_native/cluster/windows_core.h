/* Sources that can be used only as far as what lies beside them goes on. See windows_core.c. */
#ifndef KVFS_CLUSTER_WINDOWS_CORE_H
#define KVFS_CLUSTER_WINDOWS_CORE_H

#include "cluster/index_core.h"

/* Zeros at first; those of one source lie together. */
struct kvfs_windows {
    struct kvfs_window *at;
    uint32_t count, room, alone; /* `alone`: how many are of a source without full attention */
};

/* Give a source its windows, in place of those it had: 0 or -ENOMEM, and then it has those it had. */
int kvfs_windows_set(struct kvfs_windows *w, uint32_t source, const struct kvfs_window *given, size_t count);
/* Take every source with windows out of the runs behind the last boundary at which it can be used, and put one whose
 * windows are alone into all before it: 0 or -ENOMEM. While there is such a source, the runs are of the whole prompt. */
int kvfs_windows_limit(const struct kvfs_windows *w, struct kvfs_runs *runs);
/* Write what kvfs_cluster_match and kvfs_cluster_depths do, from runs. */
size_t kvfs_runs_match(const struct kvfs_runs *runs, struct kvfs_depth depths[KVFS_CLUSTER_SOURCES]);
void kvfs_runs_depths(const struct kvfs_runs *runs, const uint64_t *masks, size_t mask_count, uint64_t *depths);

#endif

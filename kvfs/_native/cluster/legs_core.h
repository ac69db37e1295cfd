/* Instances that both prefill and decode, by their roles. See legs_core.c. */
#ifndef KVFS_CLUSTER_LEGS_CORE_H
#define KVFS_CLUSTER_LEGS_CORE_H

#include "cluster/route_core.h"

struct kvfs_legs {
    double tbt_slo_s;
    int64_t leg_tokens; /* with fewer to compute, a decode instance prefills itself */
    uint8_t both_legs;  /* an instance for one side does nothing alone, nor with one that does both */
};

/* As kvfs_route, where prefill instance n and decode instance n are one, and roles say what it is for: 0 or -ENOMEM. */
int kvfs_choose_legs(struct kvfs_router *r, const struct kvfs_prompt *prompt, const struct kvfs_legs *legs,
                     struct kvfs_choice *choice);

#endif

"""The DRAM tier: slots on a tmpfs that every door maps."""

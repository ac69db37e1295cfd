"""The NVMe tier: objects as extents in the log (`tiers.log`)."""

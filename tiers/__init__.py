"""The store: tiers of memory and disks, and the one facade over them."""

"""The FUSE door."""

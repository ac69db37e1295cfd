"""The loop that reads /dev/fuse."""

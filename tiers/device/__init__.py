"""Bytes to and from a drive, by io_uring or by threads."""

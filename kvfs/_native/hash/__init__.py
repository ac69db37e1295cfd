"""Prefix hashes, checksums, samples."""

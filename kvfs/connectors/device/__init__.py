"""Paged caches in the memory of a CUDA device."""

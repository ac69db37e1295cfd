"""Blocks read and written in place."""

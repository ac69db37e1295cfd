"""Blocks between machines."""

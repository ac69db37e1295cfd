"""Eviction orders."""

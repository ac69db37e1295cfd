"""Decisions: pure functions over the state of a cluster."""

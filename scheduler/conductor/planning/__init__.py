"""Decisions over the instances of one pool, and what was committed: natively, and in Python."""

"""Processes: from accepted connections to operations."""

"""Connections between machines while the event loop has them, how many, and what a machine proves over one."""

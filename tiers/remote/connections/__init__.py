"""Connections between machines while the event loop has them, and what a machine proves over one."""

"""Blocks between machines: the wire, the threads that serve, and the streams that read."""

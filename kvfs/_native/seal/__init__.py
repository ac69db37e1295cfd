"""Seals and checksums beside the event loop."""

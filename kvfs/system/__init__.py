"""The operating system and its manager: calls, notifications, metrics, the log."""

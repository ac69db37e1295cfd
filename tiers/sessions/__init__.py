"""The local socket door."""

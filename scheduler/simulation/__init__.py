"""The policies replayed over a trace."""

"""Output of the commands: text, JSON and plots."""

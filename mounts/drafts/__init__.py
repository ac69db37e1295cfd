"""Files being written."""

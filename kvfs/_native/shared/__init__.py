"""Memory that processes share: the table, slots, and the names in the index."""

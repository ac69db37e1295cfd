"""The directory of which machine has which block, on a Redis or Valkey server."""

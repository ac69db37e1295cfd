"""Connectors for models whose KV cache is kept in several groups of layers."""

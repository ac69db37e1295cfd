"""The client of a local service. Engines and other stores' adapters name this path, so it stays."""

from kvfs.client.client import Client, connect

__all__ = ["Client", "connect"]

"""What the proxy sends to: engines, the connections to them, and what those failed with."""

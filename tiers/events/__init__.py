"""KV events of the store, and the sockets that carry them."""

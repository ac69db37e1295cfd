"""KV events: messages, sockets, and what they say of engines."""

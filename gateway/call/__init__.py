"""One request with its body, and its answer."""

"""The blocks of a cluster, and decisions over them."""

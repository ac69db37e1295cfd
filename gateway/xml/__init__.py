"""XML documents: written, and read from strangers."""

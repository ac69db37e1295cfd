"""Values that cross the store's interfaces, and the interface of a tier. Knows nobody."""

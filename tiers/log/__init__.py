"""The log of records in segment files: their order, their durability, what has ended. Knows no objects."""

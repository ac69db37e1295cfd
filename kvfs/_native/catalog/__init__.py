"""The blocks of a store, and what a start takes over, natively."""

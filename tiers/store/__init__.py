"""The one facade: what is in the store, where each object lies, and what it is called."""

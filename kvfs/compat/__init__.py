"""Modules with the surface of other stores' clients, for code that is written for those."""

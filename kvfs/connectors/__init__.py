"""Connectors: what engines load to keep their KV cache in kvfs. One module per engine (docs/engines.md).

Responsibility: turn an engine's calls into batches of `kvfs.blocks`, and its keys into prefix hashes whose namespace
says everything that decides the bytes. Nothing here is imported by `kvfs` itself; each module imports its engine, and
no module another engine's.
"""

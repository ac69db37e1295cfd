"""Connectors: what engines load to keep their KV cache in kvfs. One module per engine (docs/engines.md).

Responsibility: turn an engine's calls into batches of `kvfs.client.blocks`, and its keys into prefix hashes whose
namespace describes everything that decides the bytes. `kvfs` itself imports none of these modules; each imports its own
engine only.
"""

"""Measurements on a GPU: `python -m bench.gpu.copies`, `python -m bench.gpu.facts`."""

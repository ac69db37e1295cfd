"""The CUDA driver."""

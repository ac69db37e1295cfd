"""The rules of S3, as pure functions."""

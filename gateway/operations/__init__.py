"""The operations of S3, a function each."""

"""Plain S3 requests, and bodies."""

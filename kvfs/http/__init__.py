"""HTTP/1.1 (RFC 9112): one server, which knows no S3."""

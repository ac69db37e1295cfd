"""Signatures of requests, and the rights of credentials."""

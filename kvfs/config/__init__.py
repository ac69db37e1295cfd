"""Settings: files, credentials, sizes."""

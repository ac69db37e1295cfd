"""The cold tier: copies of cached objects in an S3 bucket elsewhere."""

"""Fixtures that the tests of the FUSE loop share."""

from tests.support.fuse_stand import stand, tier

__all__ = ["stand", "tier"]

"""Fixtures that test modules of several layers share."""

from tests.support.door import door, mode_service

__all__ = ["door", "mode_service"]

"""Damage: found, and repaired."""

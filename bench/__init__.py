"""Measurements of kvfs as ratios against what the machine's memory allows, both sides in one run.

Part of the checkout, not of an installed kvfs: `kvfs bench` loads it from the checkout that it runs from.
"""

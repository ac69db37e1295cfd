"""The ordered index of names, in LMDB."""

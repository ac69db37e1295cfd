"""`python -m kvfs` is the same as `kvfs`."""

from kvfs.cli import main

main()

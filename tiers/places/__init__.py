"""Where the segments of the NVMe tier lie: in files of a directory, or on block devices."""

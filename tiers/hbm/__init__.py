"""The HBM tier: slots in segments of a GPU's memory, which clients map and copy from themselves."""

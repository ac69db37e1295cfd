"""What a start believes of what an earlier service left."""

"""Who is on a GPU, asked of its driver."""

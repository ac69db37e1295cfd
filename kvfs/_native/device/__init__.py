"""io_uring."""

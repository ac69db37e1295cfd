"""Native: leases of memory that the kernel cannot guard."""

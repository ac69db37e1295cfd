"""Tasks that bring blocks of this machine to others."""

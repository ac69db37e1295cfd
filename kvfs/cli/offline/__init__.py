"""Commands on data directories and drives that no service uses."""

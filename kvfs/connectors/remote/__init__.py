"""What connectors have the service fetch from other machines."""

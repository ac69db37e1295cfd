"""The HTTP door of the Conductor, and the service behind it."""

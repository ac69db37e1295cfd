"""Who chooses engines: load alone, a Conductor in the process, a Conductor elsewhere."""

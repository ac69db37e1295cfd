"""What instances and stores report: events, replays, manifests, metrics."""

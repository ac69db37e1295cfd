"""The service that routes: policies over what instances and stores report."""

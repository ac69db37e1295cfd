"""The wire format of sessions, for the client, the service and the gateway."""

"""Wire formats: of sessions, for the client, the service and the gateway, and of a Conductor's orders to nodes."""

"""The store as the gateway's operations see it, over sessions."""

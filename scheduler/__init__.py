"""Where requests run: policies, their simulator, and reports."""

"""An OpenAI-compatible front for engines: prefill and decode apart, retries, and clients that go away."""

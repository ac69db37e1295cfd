"""Rules of the vLLM connector as pure functions: what is served, and when blocks under way are waited for."""

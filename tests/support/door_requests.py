"""What tests send to the Conductor's door: a prompt, and instances."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.support.conductors import instance

PROMPT = list(range(1000, 1000 + 330))


def given(name: str = "a", **values: Any) -> dict[str, Any]:
    """An instance as JSON values; nobody answers at its address."""
    found: dict[str, Any] = msgspec.to_builtins(instance(name, url="http://127.0.0.1:1", **values))
    return found

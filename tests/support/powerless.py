"""A service without any capability, whoever runs it, and without fusermount3: what a guest on a machine has."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Final

from tests.support.service import Service

FINDS_NO_PROGRAMS: Final[Mapping[str, str]] = {"PATH": "/nonexistent"}


def without_rights(command: Sequence[str]) -> list[str]:
    """Return the command, run without capabilities."""
    setpriv = shutil.which("setpriv")
    assert setpriv is not None
    return [setpriv, "--bounding-set=-all", "--inh-caps=-all", *command]


class Powerless(Service):
    def command(self) -> list[str]:
        return without_rights(super().command())

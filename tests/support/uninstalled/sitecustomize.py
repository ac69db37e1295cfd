"""An environment without pyfuse3: Python loads this first where PYTHONPATH leads here."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec


class Uninstalled:
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "pyfuse3" or name.startswith("pyfuse3."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, Uninstalled())

"""Settings from a TOML file and command-line flags, or one error with all faults.

Responsibility: a flag wins over the file, the file over the default. A wrong or unknown key is a ConfigError that
names the key, the value and the limit; no message has a secret.

Concurrency: pure but for reading the file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvfs.config.disk_room import default_dram_on_disk_bytes
from kvfs.config.settings import Settings
from kvfs.config.sizes import format_size
from kvfs.errors import ConfigError


def load(file: Path | None = None, flags: Mapping[tuple[str, str], object] | None = None) -> Settings:
    """Read settings from `file` and `flags`, by (section, key); None is a flag not given. Raises ConfigError."""
    values = _read(file) if file is not None else {}
    for (section, key), value in (flags or {}).items():
        if value is not None:
            values.setdefault(section, {})[key] = value
    try:
        settings = Settings.model_validate(values)
        return _fitted(settings).of_file(file)
    except ValidationError as error:
        where = f"{file}: " if file is not None else ""
        raise ConfigError(where + "; ".join(_explain(error.errors()))) from None


def _fitted(settings: Settings) -> Settings:
    """Return the settings with a default DRAM capacity that fits the disk too, where the tier will lie there."""
    dram = settings.dram
    if "capacity" in dram.model_fields_set or not dram.on_disk:
        return settings
    capacity_bytes = min(dram.capacity, default_dram_on_disk_bytes(settings.store.data))
    return settings.model_copy(update={"dram": dram.model_copy(update={"capacity": capacity_bytes})})


def _read(file: Path) -> dict[str, dict[str, object]]:
    try:
        values = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None
    for section, content in values.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: {section} = {content!r}: must stand in a section such as [store]")
    return values


def _explain(errors: Iterable[ErrorDetails]) -> Iterable[str]:
    """Yield a phrase for each error, such as "[dram] capacity = '12MiB': at least 16 MiB"."""
    for error in errors:
        where = [str(part) for part in error["loc"]]
        if where[:2] == ["s3", "credentials"]:
            yield _about_credentials(where[2:], error)
        elif error["type"] == "extra_forbidden":
            yield _unknown(where)
        elif where[0] in ("cold", "conductor", "proxy") and where[1:2] in (
            [],
            ["secret_key"],
            ["tokens"],
            ["engine_token"],
        ):
            # The value is a secret, or holds one.
            yield f"[{' '.join(where[:2])}]: {_limit(where, error)}"
        else:
            yield f"[{where[0]}] {'.'.join(where[1:2])} = {_shown(error)}: {_limit(where, error)}"


def _shown(error: ErrorDetails) -> str:
    """Return the wrong value, of a URL without its user, whose password may stand there."""
    value = repr(error["input"])
    return re.sub("//.*@", "//...@", value) if error["type"] == "url" else value


def _about_credentials(where: list[str], error: ErrorDetails) -> str:
    """Return a phrase for an error without the value, which may be a secret or hold one."""
    place = "[[s3.credentials]]"
    if where:
        number = f" number {int(where[0]) + 1}" if where[0].isdigit() else ""
        place += number + "".join(f" {part}" for part in where[1:])
    return f"{place}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _unknown(where: list[str]) -> str:
    if len(where) == 1:
        return f"[{where[0]}]: no such section; there are {', '.join(Settings.model_fields)}"
    section = Settings.model_fields[where[0]].annotation
    known = ", ".join(section.model_fields) if section is not None else ""
    return f"[{where[0]}] {where[1]}: no such key; there are {known}"


def _limit(where: list[str], error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    sizes = where[1:] == ["capacity"] or where[:2] in (["session", "quota"], ["nvme", "scrub_rate"])
    for bound, words in (("ge", "at least"), ("le", "at most")):
        if bound in context:
            limit = context[bound]
            return f"{words} {format_size(limit) if sizes else limit}"
    if "expected" in context:
        return f"must be {context['expected']}"
    if error["type"] == "path_type":
        return "must be a path"
    message = error["msg"]
    return message[:1].lower() + message[1:]

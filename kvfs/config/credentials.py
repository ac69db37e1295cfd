"""Credentials of the S3 door: access keys, secrets and rights.

Responsibility: the model of an entry of `[[s3.credentials]]` in the configuration, and new keys.
`kvfs.config.credential_file` edits the file.

Invariants: a secret is never part of a repr or a message. Rights only add up: what no glob grants is refused. Without
rights the owner of a bucket decides, which `gateway.backend.bucket_owners` knows.
Concurrency: plain values.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from kvfs import limits
from kvfs.errors import ConfigError

RightName = Literal["read", "write", "list"]
RIGHTS: tuple[RightName, ...] = ("read", "write", "list")

_KEY_ALPHABET = string.ascii_uppercase + "234567"
_KEY_CHARACTERS = 20
_SECRET_ALPHABET = string.ascii_letters + string.digits
_SECRET_CHARACTERS = 40


class Credential(BaseModel):
    """An access key, its secret, its owner and its rights."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    access_key: Annotated[
        str, Field(min_length=3, max_length=limits.MAX_ACCESS_KEY_BYTES, pattern=r"^[A-Za-z0-9_.@-]+$")
    ]
    secret_key: Annotated[
        SecretStr,
        Field(min_length=limits.MIN_SECRET_KEY_BYTES, max_length=limits.MAX_SECRET_KEY_BYTES),
    ]
    owner: Annotated[str, Field(max_length=limits.MAX_ACCESS_KEY_BYTES)] = ""
    """The owner of buckets and objects made with the key; several keys may share one. Empty: the access key."""
    rights: Mapping[str, frozenset[RightName]] | None = None
    """Globs over bucket names (`*`, `?`, `[...]`) to rights; all globs that match a bucket add up, whoever owns it.
    None: all rights on the owner's buckets and on those without an owner."""

    @field_validator("owner")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("only printable characters are allowed")
        return value

    @property
    def owner_id(self) -> str:
        """Return the owner's id: the access key, where no other is given."""
        return self.owner or self.access_key

    @property
    def secret(self) -> str:
        """Return the secret itself."""
        return self.secret_key.get_secret_value()

    def may(self, right: RightName, bucket: str) -> bool:
        """Return whether a glob that matches `bucket` grants `right`; without rights true, and the owner decides."""
        if self.rights is None:
            return True
        return any(right in granted and fnmatchcase(bucket, glob) for glob, granted in self.rights.items())


def parse_rights(texts: list[str]) -> dict[str, list[RightName]]:
    """Parse `GLOB=read,list` or `GLOB` (all rights) of a command line. Raises ConfigError."""
    found: dict[str, list[RightName]] = {}
    for text in texts:
        glob, equals, names = text.partition("=")
        wanted = names.split(",") if equals else list(RIGHTS)
        unknown = [name for name in wanted if name not in RIGHTS]
        if not glob or unknown:
            raise ConfigError(f"rights {text!r}: must be GLOB or GLOB=RIGHT,..., of {', '.join(RIGHTS)}")
        found[glob] = [right for right in RIGHTS if right in wanted]
    return found


def new_access_key() -> str:
    """Make an access key: 20 characters, 100 bits; unique, not secret."""
    return "".join(secrets.choice(_KEY_ALPHABET) for _ in range(_KEY_CHARACTERS))


def new_secret_key() -> str:
    """Make a secret key: 40 letters and digits, 238 bits."""
    return "".join(secrets.choice(_SECRET_ALPHABET) for _ in range(_SECRET_CHARACTERS))

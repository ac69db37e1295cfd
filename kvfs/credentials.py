"""Credentials of the S3 door: access keys, secrets and rights.

Responsibility: what one of `[[s3.credentials]]` in the configuration says, and making new keys. The file that holds
them is edited by `kvfs.credential_file`.

Invariants: a secret is never part of a repr or a message. Rights only add up: what no glob grants is refused. Without
rights, whom a bucket belongs to decides, which is `gateway.owners`'s to know.
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
    """An access key, its secret, whom it stands for and what it may do."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    access_key: Annotated[
        str, Field(min_length=3, max_length=limits.MAX_ACCESS_KEY_BYTES, pattern=r"^[A-Za-z0-9_.@-]+$")
    ]
    secret_key: Annotated[
        SecretStr,
        Field(min_length=limits.MIN_SECRET_KEY_BYTES, max_length=limits.MAX_SECRET_KEY_BYTES),
    ]
    owner: Annotated[str, Field(max_length=limits.MAX_ACCESS_KEY_BYTES)] = ""
    """Whom buckets and objects made with it belong to; several credentials may share one. Empty: the access key."""
    rights: Mapping[str, frozenset[RightName]] | None = None
    """Glob over bucket names (`*`, `?`, `[...]`) to rights; a bucket has those of all globs that match it, whomever it
    belongs to. None: all rights on the owner's buckets and on those that nobody owns."""

    @field_validator("owner")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("only printable characters are allowed")
        return value

    @property
    def owner_id(self) -> str:
        return self.owner or self.access_key

    @property
    def secret(self) -> str:
        """The secret itself."""
        return self.secret_key.get_secret_value()

    def may(self, right: RightName, bucket: str) -> bool:
        """Whether any glob that matches `bucket` grants `right`. Without rights: yes, if the bucket's owner agrees."""
        if self.rights is None:
            return True
        return any(right in granted and fnmatchcase(bucket, glob) for glob, granted in self.rights.items())


def parse_rights(texts: list[str]) -> dict[str, list[RightName]]:
    """`GLOB=read,list` or `GLOB` (all rights) of a command line. Raises ConfigError."""
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
    """20 characters, 100 bits: told apart, not secret."""
    return "".join(secrets.choice(_KEY_ALPHABET) for _ in range(_KEY_CHARACTERS))


def new_secret_key() -> str:
    """40 letters and digits, 238 bits."""
    return "".join(secrets.choice(_SECRET_ALPHABET) for _ in range(_SECRET_CHARACTERS))

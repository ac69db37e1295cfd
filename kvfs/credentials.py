"""Credentials of the S3 door: their model, and the edits of the file that holds them.

Responsibility: `[[s3.credentials]]` of the TOML configuration. A secret is never part of a repr or a message.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, SecretStr

RightName = Literal["read", "write", "list"]


class Grant(BaseModel):
    """Rights on the buckets whose names match a glob."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bucket: str = "*"
    rights: frozenset[RightName] = frozenset({"read", "write", "list"})


class Credential(BaseModel):
    """An access key, its secret, whom it stands for and what it may do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    access_key: str
    secret_key: SecretStr
    owner: str = ""
    """Defaults to the access key."""
    grants: tuple[Grant, ...] = (Grant(),)

    def may(self, right: RightName, bucket: str) -> bool:
        raise NotImplementedError

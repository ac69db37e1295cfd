"""All that a running service shows through its doors, each byte read, and where the doors disagree.

Responsibility: what a start of the service crash tests is judged by. A durable name that is listed must be readable
through every door; one of a cache may have been evicted between two looks, but two doors never read different bytes.

Concurrency: one thread, while nobody changes anything.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from kvfs.client import Client
from kvfs.errors import NotFound, ObjectTooLarge
from tests.support.block_batches import open_blocks
from tests.support.service_journal import digest_of
from tests.support.service_load import BLOCK_SALTS, PROMISED
from tests.support.stores import NAMESPACE

S3_SHARE = 0.4
"""Of the objects that are also read through S3, which takes the longest."""


@dataclass
class Look:
    """What is there: name -> digest or word."""

    damaged: set[str]
    """Names whose bytes are known to be damaged: the first that reads them may be who finds out."""
    found: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    vanished: list[str] = field(default_factory=list)
    """Listed, and gone when they were read."""
    _listed: dict[str, set[str]] = field(default_factory=dict)

    def add(self, door: str, name: str, size_bytes: int, data: bytes | None) -> None:
        self._listed.setdefault(door, set()).add(name)
        if data is None:
            self.vanished.append(f"{name} ({door})")
            if name.startswith(PROMISED) and name not in self.damaged:
                self.wrong.append(f"{name} is listed by {door} and cannot be read")
            return
        if size_bytes != len(data):
            self.wrong.append(f"{name}: {door} says {size_bytes} bytes and reads {len(data)}")
        value = digest_of(data)
        if self.found.setdefault(name, value) != value:
            self.wrong.append(f"{name}: {door} reads {value}, another door {self.found[name]}")

    def check_listings(self) -> None:
        """Durable names are listed by all doors or by none."""
        doors = list(self._listed.items())
        for (one, names), (other, others) in pairwise(doors):
            for name in sorted(names ^ others):
                if name.startswith(PROMISED) and name not in self.damaged:
                    self.wrong.append(f"{name} is listed by {one if name in names else other} only")


def look(
    mount: Path,
    buckets: list[str],
    client: Client,
    s3: Any,
    names: list[str],
    damaged: set[str],
    chance: random.Random,
) -> Look:
    """Everything, by path, session and S3 in any order; of directories, pins and blocks those in `names`."""
    found = Look(damaged)
    files = [bucket for bucket in buckets if bucket not in BLOCK_SALTS]
    looks = [
        partial(_look_by_path, found, mount, files),
        partial(_look_by_session, found, client, files),
        partial(_look_by_s3, found, s3, files, chance),
    ]
    chance.shuffle(looks)
    for each in looks:
        each()
    found.check_listings()
    _look_at_words(found, mount, names)
    for bucket in BLOCK_SALTS.keys() & set(buckets):
        _look_at_blocks(found, client, bucket, names)
    return found


def _look_by_path(found: Look, mount: Path, buckets: list[str]) -> None:
    def complain(error: OSError) -> None:
        name = str(Path(error.filename).relative_to(mount))
        # A cache's directory ends with its last file.
        if not isinstance(error, FileNotFoundError) or name.startswith(PROMISED):
            found.wrong.append(f"a directory on the mount: {error}")

    for bucket in buckets:
        for directory, _, files in os.walk(mount / bucket, onerror=complain):
            for file in files:
                path = Path(directory) / file
                name = str(path.relative_to(mount))
                try:
                    data = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
                    found.add("mount", name, path.lstat().st_size, data)
                except FileNotFoundError:
                    found.add("mount", name, 0, None)
                except OSError as error:
                    found.wrong.append(f"{name}: the mount says {error}")


def _look_by_session(found: Look, client: Client, buckets: list[str]) -> None:
    for bucket in buckets:
        for entry in client.list(f"{bucket}/"):
            if entry.is_directory:
                continue
            name = str(entry.name)
            if entry.target:
                found.add("session", name, entry.size_bytes, os.fsencode(entry.target))
                continue
            try:
                found.add("session", name, entry.size_bytes, client.get(name))
            except NotFound:
                found.add("session", name, 0, None)
            except ObjectTooLarge:
                continue


def _look_by_s3(found: Look, s3: Any, buckets: list[str], chance: random.Random) -> None:
    if s3 is None:
        return
    for bucket in buckets:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for entry in page.get("Contents", []):
                key = entry["Key"]
                if key.endswith("/") or chance.random() > S3_SHARE:
                    continue
                try:
                    answer = s3.get_object(Bucket=bucket, Key=key)
                    data = answer["Body"].read()
                    found.add("s3", f"{bucket}/{key}", entry["Size"], data)
                except ClientError as error:
                    if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                        found.wrong.append(f"{bucket}/{key}: S3 says {error}")
                    found.add("s3", f"{bucket}/{key}", 0, None)
    found._listed.pop("s3", None)  # a sample says nothing of what is not in it


def _look_at_words(found: Look, mount: Path, names: list[str]) -> None:
    for name in names:
        try:
            if name.endswith("/") and (mount / name).is_dir():
                found.found[name] = "directory"
            elif name.endswith("#pin") and os.getxattr(mount / name[:-4], "user.kvfs.pin") == b"1":
                found.found[name] = "pinned"
        except FileNotFoundError:
            continue


def _look_at_blocks(found: Look, client: Client, bucket: str, names: list[str]) -> None:
    opened = open_blocks(client, replace(NAMESPACE, salt=BLOCK_SALTS[bucket]), bucket=bucket)
    blocks = [name for name in names if name.startswith(f"{bucket}:")]
    digests = [bytes.fromhex(name.partition(":")[2]) for name in blocks]
    for name, data in zip(blocks, opened.get(digests), strict=True):
        if data is not None:
            found.found[name] = digest_of(bytes(data))

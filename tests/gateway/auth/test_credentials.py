"""Credentials: rights by glob, secrets that are never shown, and edits that keep the rest of the file as it is."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.credentials import Credentials, check_right
from gateway.backend.bucket_owners import Owners
from gateway.backend.lookup import BucketInfo, ObjectLookup
from gateway.protocol.errors import S3Error
from kvfs import limits
from kvfs.config import credential_file
from kvfs.config.credentials import RIGHTS, Credential, new_access_key, new_secret_key, parse_rights
from kvfs.config.load import load
from kvfs.errors import BucketNotFound, ConfigError, Exists, NotFound
from tests.support.waits import WAIT_S

if TYPE_CHECKING:
    from gateway.backend.backend import Backend

SECRET = "a-secret-that-nobody-may-see"
CONFIG = """# the cluster in the basement
[store]
data = "/tmp/nowhere"  # on the fast disk

[s3]
region = "eu-1"  # as the clients have it

[log]
level = "info"
"""


def credential(key: str = "alice", **more: Any) -> Credential:
    return Credential.model_validate({"access_key": key, "secret_key": SECRET, **more})


# --- rights ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rights", "right", "bucket", "granted"),
    [
        ({"*": ["read"]}, "read", "any", True),
        ({"*": ["read"]}, "write", "any", False),
        ({"m-*": ["read"]}, "read", "m-1", True),
        ({"m-*": ["read"]}, "read", "n-1", False),
        ({"m-*": ["read"], "m-1": ["write"]}, "write", "m-1", True),
        ({"m-*": ["read"], "m-1": ["write"]}, "read", "m-1", True),
        ({"M": ["read"]}, "read", "m", False),
        ({"m?": ["list"]}, "list", "m1", True),
        ({}, "read", "any", False),
        ({"*": []}, "list", "any", False),
    ],
)
def test_rights_add_up(rights: dict[str, list[str]], right: Any, bucket: str, granted: bool) -> None:
    found = credential(rights=rights)
    assert found.may(right, bucket) == granted
    if not granted:
        with pytest.raises(S3Error) as caught:
            check_right(found, right, bucket)
        assert caught.value.code == "AccessDenied"


class _Buckets:
    """What `Owners` looks at: buckets with their ages in seconds, and the owners that are noted."""

    def __init__(self) -> None:
        self.ages: dict[str, float] = {}
        self.owners: dict[str, str] = {}
        self.looks = 0

    async def bucket(self, name: str) -> BucketInfo:
        self.looks += 1
        if name not in self.ages:
            raise BucketNotFound(name)
        return BucketInfo(name, 1, time.time_ns() - int(self.ages[name] * 1e9), None)

    async def find(self, _: str, key: str) -> ObjectLookup | None:
        owner = self.owners.get(key.split("/")[1])
        return None if owner is None else ObjectLookup(1, 0, 0, owner.encode(), b"", marker=True)


def test_owners_are_remembered_for_a_moment_only() -> None:
    async def look() -> None:
        backend, now = _Buckets(), 0.0
        owners = Owners(cast("Backend", backend), clock=lambda: now)
        assert await owners.of("b") is None
        backend.ages["b"] = 0.0
        assert await owners.of("b") is None
        backend.owners["b"] = "alice"
        assert await owners.of("b") == "alice", "that a young bucket is nobody's was remembered"
        looks = backend.looks
        backend.owners["b"] = "bob"
        assert (await owners.of("b"), backend.looks) == ("alice", looks)
        now += limits.OWNER_MEMORY_S
        assert await owners.of("b") == "bob"
        del backend.owners["b"]
        owners.invalidate("b")
        assert await owners.of("b") is None
        backend.ages["old"] = 60.0
        assert await owners.of("old") is None
        backend.owners["old"] = "alice"
        assert await owners.of("old") is None
        for number in range(limits.MAX_REMEMBERED_OWNERS + 1):
            backend.ages[f"n{number}"] = 60.0
            await owners.of(f"n{number}")
        assert await owners.of("old") == "alice"
        alice, bob = credential("alice"), credential("bob")
        assert await owners.may_enter(alice, "old")
        assert not await owners.may_enter(bob, "old")
        assert await owners.may_enter(credential("bob", rights={"old": ["read"]}), "old")

    trio.run(look)


def test_lookup() -> None:
    both = Credentials([credential("alice"), credential("bob", owner="team")])
    alice, bob = both.get("alice"), both.get("bob")
    assert alice is not None
    assert bob is not None
    assert (alice.owner_id, bob.owner_id, len(both)) == ("alice", "team", 2)
    assert both.get("carol") is None
    assert alice.rights is None
    assert all(alice.may(right, "any") for right in RIGHTS)
    with pytest.raises(ConfigError, match="alice"):
        Credentials([credential("alice"), credential("alice")])


def test_new_keys_are_valid_and_differ() -> None:
    keys = {new_access_key() for _ in range(50)}
    secrets = {new_secret_key() for _ in range(50)}
    assert len(keys) == len(secrets) == 50
    for key, secret in zip(keys, secrets, strict=True):
        assert credential(key, secret_key=secret).secret == secret


def test_rights_of_a_command_line() -> None:
    assert parse_rights(["m-*=list,read", "b"]) == {"m-*": ["read", "list"], "b": ["read", "write", "list"]}
    for text in ("=read", "b=", "b=raed", ""):
        with pytest.raises(ConfigError):
            parse_rights([text])


# --- secrets -----------------------------------------------------------------------------------------------------
def entry(**values: Any) -> str:
    rows = {"access_key": "alice", "secret_key": SECRET, **values}
    return "[[s3.credentials]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in rows.items())


@pytest.mark.parametrize(
    "text",
    [
        entry(access_key=SECRET + "!"),
        entry(secret_key=SECRET[:15]),
        entry(secret_key=SECRET * 20),
        entry(secret_key=[SECRET]),
        entry(colour=SECRET),
        entry(owner=SECRET + "\n"),
        entry(rights=[SECRET]),
        entry() + f'rights = {{"*" = ["{SECRET}"]}}\n',
        f'[[s3.credentials]]\nsecret_key = "{SECRET}"\n',
        f'[s3]\ncredentials = "{SECRET}"\n',
        f'[s3]\ncredentials = ["{SECRET}"]\n',
    ],
)
def test_a_wrong_configuration_shows_no_secret(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"s3\.credentials") as caught:
        load(file)
    shown = f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"
    assert SECRET[:15] not in shown


def test_settings_show_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text(CONFIG + entry())
    settings = load(file)
    assert settings.s3.credentials[0].secret == SECRET
    assert settings.s3.region == "eu-1"
    for shown in (repr(settings), str(settings), settings.model_dump_json()):
        assert SECRET not in shown


@pytest.mark.parametrize(
    "text", ['region = "EU 1"', 'domains = ["UPPER"]', 'default_bucket = "a/b"', 'default_bucket = ""']
)
def test_other_settings_of_s3_are_checked(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text(f"[s3]\n{text}\n")
    with pytest.raises(ConfigError, match=r"\[s3\]"):
        load(file)


# --- the file ----------------------------------------------------------------------------------------------------
def test_adding_and_removing_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text(CONFIG)
    file.chmod(0o644)
    alice, bob = credential("alice", rights={"m-*": ["read"]}), credential("bob", owner="team")
    credential_file.add(file, alice)
    credential_file.add(file, bob)
    assert load(file).s3.credentials == (alice, bob)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    for line in CONFIG.splitlines():
        assert line in text.splitlines()
    credential_file.remove(file, "alice")
    assert load(file).s3.credentials == (bob,)
    credential_file.remove(file, "bob")
    assert load(file).s3.credentials == ()
    left = [line for line in file.read_text().splitlines() if line]
    assert left == [line for line in CONFIG.splitlines() if line]
    assert os.listdir(tmp_path) == ["kvfs.toml"]


def test_a_new_file_has_mode_0600(tmp_path: Path) -> None:
    file = tmp_path / "new.toml"
    credential_file.add(file, credential())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load(file).s3.credentials == (credential(),)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "kvfs.toml", tmp_path / "kvfs.toml"
    link.symlink_to(real)
    real.write_text(CONFIG)
    credential_file.add(link, credential())
    assert link.is_symlink()
    assert load(real).s3.credentials == (credential(),)


def test_what_cannot_be_edited_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    cases: list[tuple[str, type[Exception]]] = [
        ("[store]\ncolour = 1\n", ConfigError),
        ("[[", ConfigError),
        ("[s3]\ncredentials = []\n", ConfigError),
        ("s3 = 3\n", ConfigError),
        (entry(), Exists),
    ]
    for text, kind in cases:
        file.write_text(text)
        with pytest.raises(kind, match=r"kvfs\.toml") as caught:
            credential_file.add(file, credential())
        assert file.read_text() == text
        assert os.listdir(tmp_path) == ["kvfs.toml"]
        assert ".kvfs.toml." not in str(caught.value)
    with pytest.raises(NotFound, match="bob"):
        credential_file.remove(file, "bob")
    with pytest.raises(ConfigError):
        credential_file.add(tmp_path / "missing" / "kvfs.toml", credential())


def test_edits_at_once_all_count(tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    names = [f"key{number}" for number in range(12)]
    threads = [threading.Thread(target=credential_file.add, args=(file, credential(name))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found.access_key for found in load(file).s3.credentials) == sorted(names)


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_credential_is_read_as_it_was_written_or_refused(key: str, owner: str) -> None:
    try:
        found = credential(key, owner=owner)
    except ValueError:
        return
    assert found.access_key == key
    assert found.owner == owner
    assert owner.isprintable()


# --- the command line --------------------------------------------------------------------------------------------
def kvfs(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvfs", "credentials", *arguments],
        input=given,
        text=True,
        capture_output=True,
        timeout=WAIT_S,
    )


def test_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    at = ("--config", str(file))
    made = json.loads(kvfs("add", *at, "--json").stdout)
    added = kvfs("add", "--access-key", "alice", "--owner", "team", "--secret-stdin", "--rights", "m-*=read", *at,
                 given=SECRET + "\n")  # fmt: skip
    assert added.stdout == "access_key alice\n"
    assert added.stderr == ""
    first, second = load(file).s3.credentials
    assert first.rights is None
    assert (first.access_key, first.secret) == (made["access_key"], made["secret_key"])
    assert second == credential("alice", owner="team", rights={"m-*": ["read"]})
    shown = kvfs("list", *at)
    assert "alice" in shown.stdout
    assert "m-*=read" in shown.stdout
    assert SECRET not in shown.stdout + kvfs("list", "--json", *at).stdout
    assert kvfs("remove", "alice", *at).returncode == 0
    missing = kvfs("remove", "alice", *at)
    assert (missing.returncode, missing.stderr.count("\n")) == (3, 1)
    short = kvfs("add", "--access-key", "bob", "--secret-stdin", *at, given="short\n")
    assert short.returncode == 2
    assert "short" not in short.stderr

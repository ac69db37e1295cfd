"""LMCache's own S3 classes, unmodified, against the S3 endpoint: in plain HTTP and over TLS, below and
above a part's size.

They speak to a bucket that is part of the host's name, or to the default bucket of a host without one, and trust the
certificates of the system only. Both are given to them by a mount namespace of their own, with its own `/etc/hosts` and
`/etc/ssl/certs`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines.run_lmcache_s3 import TOKEN_BYTES
from tests.engines.scripts import run_script
from tests.support.certificates import certificate
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.gateway import ACCESS, SECRET, Gateway, gateway

pytestmark = [
    pytest.mark.engine,
    pytest.mark.mount,
    pytest.mark.timeout(300),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DOMAIN, BUCKET, DEFAULT_BUCKET = "s3.test", "kv-cache", "kv-default"
HOSTS = {BUCKET: f"{BUCKET}.{DOMAIN}", DEFAULT_BUCKET: "cache.test"}
SETTINGS = f'domains = ["{DOMAIN}"]\ndefault_bucket = "{DEFAULT_BUCKET}"'
CERTIFICATES = Path("/etc/ssl/certs")
TOKENS = {"below": 8, "above": (24 << 20) // TOKEN_BYTES}
"""Of a chunk, by its size beside that of a part."""


@pytest.fixture(scope="module", params=[False, True], ids=["http", "https"])
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    need_mount()
    names = ",".join(f"DNS:{name}" for name in ("localhost", *HOSTS.values()))
    files = certificate(tmp_path_factory.mktemp("tls"), f"{names},IP:127.0.0.1") if request.param else None
    with gateway(dram="512MiB", settings=SETTINGS, certificate=files) as found:
        for bucket in HOSTS:
            found.client().create_bucket(Bucket=bucket)
        yield found
        assert not found.service.complaints()


@pytest.fixture(scope="module")
def namespace(door: Gateway, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command that runs another where the endpoint's names are known and its certificate is trusted."""
    folder = tmp_path_factory.mktemp("namespace")
    hosts, trusted = folder / "hosts", folder / "certs"
    hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *HOSTS.values())))
    trusted.mkdir()
    if door.certificate is not None:
        shutil.copy(door.certificate, trusted / "ca-certificates.crt")
    binds = f'mount --bind "{hosts}" /etc/hosts && mount --bind "{trusted}" {CERTIFICATES} && exec "$@"'
    who = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", "--mount", *who, "sh", "-c", binds, "sh"]
    if shutil.which("unshare") is None or not CERTIFICATES.is_dir():
        pytest.skip(f"needs unshare and {CERTIFICATES}")
    if subprocess.run([*command, "true"], check=False).returncode != 0:
        pytest.skip("no mount namespaces here")
    return command


class Size(NamedTuple):
    """What LMCache's classes are asked for with chunks of a size, and what they said."""

    bucket: str
    chunk_bytes: int
    found: dict[str, Any]


@pytest.fixture(scope="module")
def sizes(
    door: Gateway, namespace: list[str], engine_python: str, engine_wheels: str, work: Path
) -> dict[str, Size]:
    """Chunks below and above a part's size, by one process."""
    buckets = {size: BUCKET if door.secure == (size == "above") else DEFAULT_BUCKET for size in TOKENS}
    asked = [
        {
            "endpoint": f"{HOSTS[buckets[size]]}:{door.port}",
            "access": ACCESS,
            "secret": SECRET,
            "tls": door.secure,
            "http2": door.secure or size == "above",
            "tokens": tokens,
        }
        for size, tokens in TOKENS.items()
    ]
    answers = run_script(engine_python, work, "lmcache_s3", asked, engine_wheels, within=namespace)
    return {
        size: Size(buckets[size], tokens * TOKEN_BYTES, found)
        for (size, tokens), found in zip(TOKENS.items(), answers, strict=True)
    }


@pytest.mark.parametrize("size", TOKENS)
def test_lmcaches_s3_classes(door: Gateway, sizes: dict[str, Size], size: str) -> None:
    bucket, chunk_bytes, found = sizes[size]
    check_connector(found["connector"])
    check_l2(found["l2"], chunk_bytes)
    check_other_doors(door, bucket, found["connector"]["stored"])


def check_connector(found: dict[str, Any]) -> None:
    stored = [True] * 3 + [False]
    assert (found["before"], found["contains before"], found["get before"]) == ([False, False], 0, False)
    assert (found["exists"], found["contains"]) == (stored, 3)
    assert (found["get"], found["batched get"], found["prefetch"]) == (stored, stored, [True] * 3)
    assert (found["wrong secret"], found["wrong key"]) == ([False, False], [False, False])
    assert (found["after"], found["list"]) == (False, "NotImplementedError")


def check_l2(found: dict[str, Any], size_bytes: int) -> None:
    stored = [True] * 3 + [False]
    assert (found["before"], found["look-up"]) == ([False] * 4, stored)
    assert (found["store"], found["store again"]) == ([True, 3 * size_bytes], [True, 0])
    assert (found["load"], found["equal"]) == (stored, stored)
    assert (found["list"], found["list of another model"]) == ([size_bytes] * 3, [])
    assert found["look-up after delete"] == [True, False, True, False]
    assert found["wrong secret"] == [[False, 0], [False], [False]]
    assert found["healthy"] == [True] * 3


def check_other_doors(door: Gateway, bucket: str, stored: dict[str, str]) -> None:
    """What LMCache wrote is on the mount and at S3 under LMCache's names, with the same bytes."""
    s3 = door.client()
    present = {entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]}
    assert len(present & stored.keys()) == 3
    for key in present & stored.keys():
        mounted = (door.service.mount / bucket / key).read_bytes()
        read = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        assert [hashlib.sha256(each).hexdigest() for each in (mounted, read)] == [stored[key]] * 2

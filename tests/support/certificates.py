"""Certificates for tests, made by `openssl`: self-signed ones of servers, and an authority's of a cluster's machines.

Concurrency: one thread.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str, given: bytes | None = None) -> bytes:
    return subprocess.run(["openssl", *arguments], input=given, check=True, capture_output=True).stdout


def certificate(where: Path, names: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """A certificate and its key; `names` as OpenSSL writes subjectAltName."""
    files = where / "cert.pem", where / "key.pem"
    _openssl(
        *("req", "-x509", *_CURVE, "-days", "2"),
        *("-subj", "/CN=kvfs-test", "-addext", f"subjectAltName={names}"),
        *("-out", str(files[0]), "-keyout", str(files[1])),
    )
    return files


class ClusterTls(NamedTuple):
    """Names the files of one machine, as `[cluster]` does."""

    certificate: Path
    key: Path
    authorities: Path


def authority(where: Path) -> Path:
    """A certificate that signs others; its key is beside it."""
    made = where / "authority.pem"
    _openssl(
        *("req", "-x509", *_CURVE, "-days", "2", "-subj", "/CN=kvfs-cluster"),
        *("-out", str(made), "-keyout", str(made.with_suffix(".key"))),
    )
    return made


def signed(where: Path, by: Path, *, days: int = 2) -> ClusterTls:
    """A machine's certificate that an authority has signed; its time is over with `days` below 0."""
    files = ClusterTls(where / "machine.pem", where / "machine.key", by)
    asked = _openssl("req", "-new", *_CURVE, "-subj", "/CN=machine", "-keyout", str(files.key))
    _openssl(
        *("x509", "-req", "-CA", str(by), "-CAkey", str(by.with_suffix(".key")), "-CAcreateserial"),
        *("-days", str(days), "-out", str(files.certificate)),
        given=asked,
    )
    return files


def locked(key: Path, where: Path) -> Path:
    """A key again, with a passphrase."""
    _openssl("ec", "-aes256", "-passout", "pass:abcd", "-in", str(key), "-out", str(where))
    return where


@pytest.fixture(scope="session")
def cluster_tls(tmp_path_factory: pytest.TempPathFactory) -> ClusterTls:
    """The files of a machine, good for any number of them."""
    folder = tmp_path_factory.mktemp("cluster-tls")
    return signed(folder, authority(folder))

"""A service without a mount: clients and S3, without FUSE and without a right beyond a plain user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.client import discovery
from tests.support.gateway import Gateway, gateway
from tests.support.powerless import FINDS_NO_PROGRAMS, Powerless
from tests.support.service import ROOT, Service, run_kvfs
from tests.support.stores import NAMESPACE

WITHOUT_PYFUSE3 = {"PYTHONPATH": f"{ROOT}/tests/support/uninstalled{os.pathsep}{ROOT}"}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Powerless(mode="off", dram="32MiB", nvme="16MiB", environment=FINDS_NO_PROGRAMS) as running:
        yield running
        assert not running.complaints()


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    """Serve S3 in an environment without pyfuse3."""
    with gateway(mode="off", dram="32MiB", environment=WITHOUT_PYFUSE3) as running:
        yield running


def test_clients_are_served(service: Service) -> None:
    assert service.mount not in discovery.mounts()
    assert "no mount" in service.wait_told("STATUS=")
    with kvfs.connect(service.data) as client:
        client.create_bucket("bucket")
        client.put("bucket/key", b"bytes")
        assert client.get("bucket/key") == b"bytes"
        assert client.status()["mount"] == {
            "path": None,
            "mode": "off",
            "missing": client.status()["mount"]["missing"],
        }
        with client.blocks(NAMESPACE) as blocks:
            key = bytes(range(16))
            assert blocks.put([key], [b"block"]) == [True]
            assert blocks.match([key]) == 1


def test_it_comes_back_with_what_it_had(service: Service) -> None:
    with kvfs.connect(service.data) as client:
        client.create_bucket("kept")
        client.put("kept/key", b"bytes")
    service.kill()
    service.restart()
    with kvfs.connect(service.data) as client:
        assert client.get("kept/key") == b"bytes"


def test_commands_reach_it_by_its_data(service: Service) -> None:
    shown = run_kvfs("status", "--at", str(service.data))
    assert shown.returncode == 0, shown
    assert "none" in next(line for line in shown.stdout.splitlines() if line.startswith("mount"))


def test_s3_is_served(door: Gateway) -> None:
    client = door.client()
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="key", Body=b"bytes")
    assert client.get_object(Bucket="bucket", Key="key")["Body"].read() == b"bytes"


@pytest.mark.parametrize("other", [["--mount=/x"], ["--mode=plain"], ["--no-passthrough"]])
def test_options_of_a_mount_contradict_it(other: list[str]) -> None:
    refused = run_kvfs("serve", "--no-mount", *other)
    assert refused.returncode == 2
    assert "--no-mount contradicts" in refused.stderr


def test_it_needs_no_pyfuse3(door: Gateway) -> None:
    """`test_s3_is_served` has the other door."""
    with door.service.client() as client:
        client.create_bucket("client")
        client.put("client/key", b"bytes")
        assert client.get("client/key") == b"bytes"


def test_a_mount_without_pyfuse3_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    refused = run_kvfs(
        "serve",
        f"--mount={tmp_path / 'mnt'}",
        f"--data={tmp_path / 'data'}",
        "--dram=32MiB",
        environment=WITHOUT_PYFUSE3,
    )
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr == (
        "kvfs: a mount needs pyfuse3 (No module named 'pyfuse3'): pip install 'kvfs[server]'; "
        "without a mount: kvfs serve --no-mount\n"
    )
    assert list(tmp_path.iterdir()) == []

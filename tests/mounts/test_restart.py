"""The service comes back: what is on the mount after a kill, a clean stop, and a stop that gives the memory back."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvfs.client import discovery
from tests.support.block_batches import Block, open_blocks
from tests.support.door import BUCKET, ON_DIRECTORY, TEST_MODES
from tests.support.holder import RIGHT, Holder
from tests.support.posix import expect_errno, handle_of, open_handle, opened, pattern
from tests.support.seeds import SEED
from tests.support.service import Service, mounts_under, run_kvfs
from tests.support.small_store import MIB, check, checksums, refill, small_service, write_sealed
from tests.support.stores import NAMESPACE
from tests.support.waits import eventually
from tiers.dram import tmpfs

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]


@pytest.fixture(params=TEST_MODES)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with small_service(request.param) as running:
        yield running


@pytest.fixture
def bucket(service: Service) -> Path:
    return service.mount / BUCKET


def fill(bucket: Path, count: int = 20) -> dict[Path, bytes]:
    """Sealed files in nested directories, with their checksums."""
    files = {bucket / f"d{i % 3}/e{i % 2}/file-{i}": pattern(i, 50_000 + 17_011 * i) for i in range(count)}
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, data)
        os.chmod(path, 0o640)
        os.utime(path, ns=(10**18, 10**18 + 7))
    return files


def wait_for_checksums(service: Service) -> None:
    """The checksum of a sealed slot follows it by a moment; what has none does not outlive a kill."""
    eventually(lambda: all(checksums(service)), "every slot has its checksum")


def end(service: Service, how: str) -> None:
    if how == "kill":
        wait_for_checksums(service)
        service.kill()
    else:
        service.stop()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_mount_comes_back_with_its_files(
    service: Service, bucket: Path, how: str, tmp_path: Path
) -> None:
    files = fill(bucket)
    stats = {path: path.stat() for path in files}
    tree = sorted(os.walk(bucket))
    end(service, how)
    assert str(service.data / "dram") in mounts_under(service.base)
    service.restart()
    assert discovery.mounts().count(service.mount) == 1
    assert sorted(os.walk(bucket)) == tree
    assert check(files) == len(files)
    for path, before in stats.items():
        now = path.stat()
        # Without the native loop the kernel shows the nodeid, which is a new one.
        fields = () if service.mode == "plain" else ("st_ino",)
        for field in (*fields, "st_mode", "st_uid", "st_gid", "st_size", "st_mtime_ns"):
            assert getattr(now, field) == getattr(before, field), (path, field)
    for name in ("d0", "d1", "d2"):  # what engines and their users do: copy out, compare, copy in
        shutil.copytree(bucket / name, tmp_path / name)
        subprocess.run(["diff", "-r", bucket / name, tmp_path / name], check=True)
    (path, data), *_ = files.items()
    subprocess.run(["cp", path, bucket / "copied"], check=True)
    subprocess.run(["cmp", path, bucket / "copied"], check=True)
    path.write_bytes(data[:1000])
    assert path.read_bytes() == data[:1000]
    assert re.search(r"taken over: 20 objects, .* verify \d", service.log())


def test_readers_over_a_kill_and_hits_after_it(service: Service, bucket: Path) -> None:
    files = fill(bucket, 8)
    path, data = next(iter(files.items()))
    with Holder(path, data, "descriptor") as reader, Holder(path, data, "populated mapping") as mapped:
        wait_for_checksums(service)
        service.kill()
        service.restart()
        assert check(files) == len(files)
        for _ in range(3):
            assert path.read_bytes() == data
        with service.client() as client:
            assert client.status()["hits"] >= 4
            assert client.stat(service.name(path)).hits >= 4
            client.evict(service.name(path))
        if service.mode == "passthrough":  # the kernel has the slot itself, whoever serves the mount
            assert reader.look() == RIGHT
            assert mapped.look() == RIGHT
        expected = refill(bucket, 5)
        assert check(expected) >= len(expected) // 4
        if service.mode == "passthrough":
            assert reader.look() == RIGHT
            assert mapped.look() == RIGHT


def test_handles_from_before_lead_to_no_other_file(service: Service, bucket: Path) -> None:
    """The same steps after each start: where numbers of nodes began alike, a handle would lead to what has it now."""
    paths = [bucket / f"file-{i}" for i in range(8)]
    for path in paths:
        write_sealed(path, path.name.encode())
    handles = [handle_of(path) for path in paths]
    service.stop()
    service.restart()
    for path in reversed(paths):
        path.stat()
    with opened(bucket, os.O_RDONLY) as on_mount:
        for path in paths:
            with opened(path, os.O_RDONLY) as kept:  # what nobody has open, the kernel may drop at any time
                found = open_handle(on_mount, handle_of(Path(f"/proc/self/fd/{kept}")))
                assert os.read(found, 100) == path.name.encode()
                os.close(found)
        for handle in handles:
            with expect_errno(errno.ESTALE):
                os.close(open_handle(on_mount, handle))


def test_blocks_of_a_session_are_there_again(service: Service) -> None:
    digests = [bytes([i + 1]) * 16 for i in range(10)]
    blocks = [
        Block(digest, pattern(i, 9000), parent=digests[i - 1] if i else None)
        for i, digest in enumerate(digests)
    ]
    with service.client() as client:
        open_blocks(client, NAMESPACE).put(blocks)
    wait_for_checksums(service)
    service.kill()
    service.restart()
    with service.client() as client:
        bound = open_blocks(client, NAMESPACE)
        assert bound.match(digests) == 10
        assert bound.get(digests) == [block.data for block in blocks]
        assert bound.put(blocks[:1]) == [False], "the first seal wins, also of a service before"


def test_removed_renamed_and_half_written_files_stay_so(service: Service, bucket: Path) -> None:
    files = fill(bucket, 9)
    paths = list(files)
    paths[0].unlink()
    os.rename(paths[1], bucket / "renamed")
    os.rename(paths[2], paths[3])
    os.rename(bucket / "d2", bucket / "moved")
    writer = os.open(bucket / "half", os.O_WRONLY | os.O_CREAT)
    os.write(writer, b"half" * 1000)
    wait_for_checksums(service)
    expected = {bucket / "renamed": files[paths[1]], paths[3]: files[paths[2]]}
    for path in paths[4:]:
        expected[Path(str(path).replace("/d2/", "/moved/"))] = files[path]
    service.kill()
    service.restart()
    found = [Path(directory) / name for directory, _, names in os.walk(bucket) for name in names]
    assert sorted(found) == sorted(path for path in expected if path.exists())
    assert check(expected) == len(expected)
    with suppress(OSError):  # the mount that it was opened on is gone
        os.close(writer)


@pytest.mark.seeded
def test_many_kills_at_any_moment(service: Service, bucket: Path) -> None:
    """Keys whose content follows from the key: whatever is found is right, and some of it always is."""
    chance = random.Random(SEED)
    contents = {bucket / f"key-{i}": pattern(i, 1000 + i * 7919 % 300_000) for i in range(40)}
    adopted = 0
    for _ in range(4):
        for path in chance.sample(list(contents), 25):
            path.write_bytes(contents[path])
            if chance.random() < 0.2:
                path.unlink()
        service.kill()
        service.restart()
        adopted += check(contents)
    assert adopted > 4


@pytest.mark.parametrize("way", ["config", "command"])
def test_the_memory_is_given_back_on_request(service: Service, bucket: Path, way: str) -> None:
    fill(bucket, 4)
    if way == "config":
        service.stop()
        service.arguments.append("--no-keep")
        service.restart()
        service.stop()
    else:
        assert str(service.pid) in run_kvfs("drop", str(service.data)).stderr, "not while it runs"
        service.stop()
        assert f"kvfs drop {service.data}" in service.log()
        dropped = run_kvfs("drop", str(service.data))
        assert dropped.returncode == 0
        assert "freed" in dropped.stdout
    assert not tmpfs.is_mounted(service.data / "dram")
    service.restart()
    assert os.listdir(service.mount) == [BUCKET]
    assert [names for _, _, names in os.walk(bucket) if names] == []


def test_nothing_to_keep_leaves_no_tmpfs(service: Service, bucket: Path) -> None:
    (bucket / "file").write_bytes(b"data")
    (bucket / "file").unlink()
    service.stop()
    assert mounts_under(service.base) == []


def test_a_smaller_capacity_is_kept_at_once(service: Service, bucket: Path) -> None:
    files = refill(bucket, 1, 0.8)
    service.stop()
    service.dram = "16MiB"
    service.restart()
    with service.client() as client:
        tier = client.status()["tiers"][0]
    assert tier["capacity_bytes"] == 16 * MIB
    assert tier["used_bytes"] <= 16 * MIB
    assert 4 <= check(files) <= 16


def test_data_of_another_boot_is_not_believed_after_a_kill(service: Service, bucket: Path) -> None:
    fill(bucket, 4)
    wait_for_checksums(service)
    service.kill()
    file = service.data / "format.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "boot_id": "another"}))
    service.restart()
    assert os.listdir(service.mount) == []
    bucket.mkdir()
    write_sealed(bucket / "file", b"works")

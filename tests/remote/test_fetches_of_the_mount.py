"""Blocks that another machine has, read by a path on the mount of this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvfs.keys import block_name
from kvfs.limits import MIB
from tests.support.door import ON_DIRECTORY, TEST_MODES, need_mount
from tests.support.machines import digest_of, payload_of, write_secret
from tests.support.own_ports import own_port
from tests.support.peer_services import wait_for_peers
from tests.support.posix import NOBODY, SOMEBODY, expect_errno, run_as, start_child, wait_child
from tests.support.service import STOP_WAIT_S, Service, run_kvfs
from tests.support.small_store import watched
from tests.support.stores import NAMESPACE
from tests.support.waits import eventually

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

COUNT = 24
ABSENT = bytes(range(16))
HANG_S = 3
"""How long a look-up waits for a machine that hangs: longer than what the tests do beside it."""


class Machines:
    """A machine that has blocks, and one with a mount, which has none at first."""

    def __init__(self, other: Service, here: Service, port: int) -> None:
        self.other, self.here, self._port = other, here, port

    def path(self, digest: bytes, bucket: str = "blocks") -> Path:
        return self.here.mount / bucket / block_name(digest).decode()

    def cluster(self) -> dict[str, Any]:
        with self.here.client() as client:
            return dict(client.status()["cluster"])

    def asks(self) -> bool:
        """Whether the other machine, which is paused, has not read what it was asked."""
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(row[1].endswith(f":{self._port:04X}") and int(row[4].split(":")[1], 16) for row in rows)

    def put(self, digest: bytes, payload: bytes) -> None:
        """Put a block on the other machine."""
        with self.other.client() as client, client.blocks(NAMESPACE, bucket="blocks") as blocks:
            assert all(blocks.put([digest], [payload], [None]))


@contextmanager
def machines(
    base: Path, mode: str, more: str = "mount_fetches = true", wait_s: float = 5
) -> Iterator[Machines]:
    """Run both, with a bucket for blocks on each, and put COUNT blocks into the first one's."""
    need_mount()
    base.mkdir(exist_ok=True)
    address = f"127.0.0.1:{(port := own_port())}"
    secret = f"secret_file = '{write_secret(base / 'secret')}'\nmatch_wait_s = {wait_s}\n"
    (base / "other.toml").write_text(f"[cluster]\nlisten = '{address}'\n{secret}")
    (base / "here.toml").write_text(f"[cluster]\npeers = ['{address}']\n{secret}{more}\n")
    with (
        Service(mode="off", arguments=["--config", str(base / "other.toml")]) as other,
        Service(mode=mode, nvme="64MiB", arguments=["--config", str(base / "here.toml")]) as here,
    ):
        with other.client() as client, client.blocks(NAMESPACE, bucket="blocks") as blocks:
            digests = [digest_of(number) for number in range(COUNT)]
            payloads = [payload_of(number, MIB) for number in range(COUNT)]
            assert all(blocks.put(digests, payloads, [None, *digests[:-1]]))
        with here.client() as client:
            eventually(lambda: client.status()["cluster"]["peers_up"] == 1, "the other machine is up")
            client.create_bucket("blocks", mode=0o755)
            client.blocks(NAMESPACE, bucket="blocks").close()
        with watched(here):
            yield Machines(other, here, port)
        assert not here.complaints()


@pytest.fixture(scope="module", params=TEST_MODES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("machines"), request.param) as running:
        yield running


def test_a_block_of_another_machine_is_read_and_is_here_then(both: Machines) -> None:
    path = both.path(digest_of(0))
    assert path.read_bytes() == payload_of(0, MIB)
    fetched = both.cluster()["fetched_blocks"]
    assert path.read_bytes() == payload_of(0, MIB)
    assert both.cluster()["fetched_blocks"] == fetched
    with both.here.client() as client:
        assert client.stat(both.here.name(path)).tier == "dram"


def test_its_attributes_are_those_of_a_block(both: Machines) -> None:
    path = both.path(digest_of(1))
    assert os.access(path, os.F_OK)
    assert path.stat().st_size == MIB


def test_a_listing_shows_what_is_here(both: Machines) -> None:
    """The directories on the way to a block are found by name, whether there is a block in them here or not."""
    path = both.path(digest_of(2))
    shelf, others = path.parent, both.path(b"\xfe" * 16).parent
    assert path.name not in os.listdir(shelf)
    path.stat()
    assert path.name in os.listdir(shelf)
    assert shelf.name in os.listdir(shelf.parent)
    assert others.is_dir()
    assert os.listdir(others) == []
    assert others.name not in os.listdir(shelf.parent)


def test_many_are_asked_for_at_once(both: Machines) -> None:
    numbers = [*range(3, COUNT), *range(3, COUNT)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: both.path(digest_of(number)).read_bytes(), numbers))
    assert found == [payload_of(number, MIB) for number in numbers]
    assert both.cluster()["fetched_blocks"] <= COUNT + 8  # and a few of the other tests


def test_what_nobody_has_is_a_miss_until_somebody_has_it(both: Machines) -> None:
    path, asked = both.path(ABSENT), both.cluster()["matches"]
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            path.read_bytes()
    assert both.cluster()["matches"] == asked + 2
    both.put(ABSENT, b"a block")
    assert path.read_bytes() == b"a block"


def test_a_block_that_goes_is_fetched_again(both: Machines) -> None:
    path = both.path(digest_of(0))
    path.stat()
    fetched = both.cluster()["fetched_blocks"]
    with both.here.client() as client:
        client.remove(both.here.name(path))
    assert path.read_bytes() == payload_of(0, MIB)
    assert both.cluster()["fetched_blocks"] == fetched + 1


def test_others_are_asked_for_blocks_of_caches_alone(both: Machines) -> None:
    """Objects have no content that their names say, and what is fetched into a durable bucket would stay there."""
    here, digest = both.here, b"\xfd" * 16
    both.put(digest, b"a block")
    with here.client() as client:
        client.create_bucket("plain")
        client.create_bucket("kept", durable=True)
        client.blocks(NAMESPACE, bucket="kept").close()
    asked = both.cluster()["matches"]
    name = both.path(digest).name
    for path in (
        both.path(digest, "plain"),
        both.path(digest, "kept"),
        here.mount / "plain" / name,
        here.mount / "blocks" / name,
        here.mount / "blocks/kv" / name,
        here.mount / "blocks/kv/fd" / name.replace("fd", "FD"),
        here.mount / "blocks/kv/fc" / name,
        here.mount / "blocks/kv/another",
    ):
        with pytest.raises(FileNotFoundError):
            path.stat()
    assert not both.path(digest, "kept").parent.parent.exists()
    assert both.cluster()["matches"] == asked
    assert both.path(digest).read_bytes() == b"a block"


def test_a_bucket_that_is_bound_later_leads_to_others(both: Machines) -> None:
    """The loop knows all names of a directory that was made by path, and `kv` is none of them."""
    digest = b"\xfc" * 16
    both.put(digest, b"a block")
    path = both.path(digest, "later")
    (both.here.mount / "later").mkdir()
    assert not (both.here.mount / "later/kv").exists()
    (both.here.mount / "later/file").write_bytes(b"of another kind")
    with both.here.client() as client:
        client.blocks(NAMESPACE, bucket="later").close()
    assert path.read_bytes() == b"a block"


def test_nobody_fetches_what_he_may_not_read(both: Machines) -> None:
    """As at a session's FETCH: searching a bucket is not enough to have it fetched into."""
    bucket, digest = both.here.mount / "blocks", b"\xfb" * 16
    both.put(digest, b"a block")
    path, asked = both.path(digest), both.cluster()["matches"]
    os.chown(bucket, 0, SOMEBODY)
    os.chmod(bucket, 0o751)
    try:
        with expect_errno(2):
            run_as(NOBODY, path.stat)
        os.chmod(bucket, 0o750)
        with expect_errno(13):
            run_as(NOBODY, path.stat)
        assert both.cluster()["matches"] == asked
        assert run_as(NOBODY, path.read_bytes, groups=[SOMEBODY]) == b"a block"
    finally:
        os.chmod(bucket, 0o755)
    with both.other.client() as client:
        client.remove(f"blocks/{block_name(digest).decode()}")


def test_a_bucket_whose_names_were_asked_for_leads_to_others(both: Machines) -> None:
    """Once a file is made in a directory the loop learns its names, which `kv` is none of."""
    with both.here.client() as client:
        client.blocks(NAMESPACE, bucket="learnt").close()
    (both.here.mount / "learnt/file").write_bytes(b"of another kind")
    assert both.path(ABSENT, "learnt").parent.is_dir()


def test_directories_that_are_shown_have_their_bucket_s_rights(both: Machines) -> None:
    bucket, shelf = both.here.mount / "blocks", both.path(b"\xf9" * 16).parent
    assert shelf.stat().st_mode & 0o777 == 0o755
    os.chmod(bucket, 0o711)
    try:
        assert shelf.stat().st_mode & 0o777 == shelf.parent.stat().st_mode & 0o777 == 0o711
    finally:
        os.chmod(bucket, 0o755)


def test_nothing_is_made_below_the_directories_that_are_shown(both: Machines) -> None:
    path = both.path(b"\xfa" * 16)
    with expect_errno(1):
        path.write_bytes(b"not by its name")
    with expect_errno(1):
        (path.parent / "directory").mkdir()
    with expect_errno(17):
        path.parent.mkdir()


@pytest.mark.parametrize("mode", TEST_MODES)
def test_two_mounts_find_each_other_s_blocks(mode: str, tmp_path: Path) -> None:
    need_mount()
    addresses = [f"{host}:{own_port()}" for host in ("127.0.0.1", "127.0.0.2")]
    secret = write_secret(tmp_path / "secret")
    with ExitStack() as stack:
        services = []
        for number, address in enumerate(addresses):
            config = tmp_path / f"{number}.toml"
            config.write_text(
                f"[cluster]\nlisten = '{address}'\npeers = {addresses}\nsecret_file = '{secret}'\n"
                "match_wait_s = 5\nmount_fetches = true\n"
            )
            services.append(stack.enter_context(Service(mode=mode, arguments=["--config", str(config)])))
        for number, service in enumerate(services):
            with service.client() as client, client.blocks(NAMESPACE, bucket="blocks") as blocks:
                wait_for_peers(client, 1)
                assert all(blocks.put([digest_of(number)], [payload_of(number, MIB)], [None]))
        names = [block_name(digest_of(number)).decode() for number in range(3)]
        for service in services:
            found = [(service.mount / "blocks" / name).read_bytes() for name in names[:2]]
            assert found == [payload_of(number, MIB) for number in range(2)]
            assert not (service.mount / "blocks" / names[2]).exists()
            assert not service.complaints()


@pytest.mark.parametrize("mode", TEST_MODES)
def test_others_are_asked_only_where_that_is_set(mode: str, tmp_path: Path) -> None:
    with machines(tmp_path, mode, more="") as both:
        path = both.path(digest_of(0))
        with pytest.raises(FileNotFoundError):
            path.read_bytes()
        assert not path.parent.parent.exists()
        assert both.cluster()["matches"] == 0


@pytest.mark.parametrize("mode", TEST_MODES)
def test_a_machine_that_hangs_costs_its_look_ups_a_wait_and_others_nothing(mode: str, tmp_path: Path) -> None:
    with machines(tmp_path, mode, wait_s=HANG_S) as both, ThreadPoolExecutor(1) as pool:
        path, elsewhere = both.path(digest_of(0)), both.here.mount / "elsewhere"
        elsewhere.mkdir()
        with both.other.paused():
            missed = pool.submit(path.stat)
            eventually(both.asks, "the look-up asks")
            (elsewhere / "file").write_bytes(b"bytes")
            assert (elsewhere / "file").read_bytes() == b"bytes"
            assert not (elsewhere / "none").exists()
            assert os.listdir(path.parent.parent) == []
            assert not missed.done()
            with pytest.raises(FileNotFoundError):
                missed.result()
        eventually(path.exists, "the other machine is asked again")


@pytest.mark.parametrize("mode", TEST_MODES)
def test_a_look_up_that_waits_holds_up_no_news_of_other_names(mode: str, tmp_path: Path) -> None:
    """The kernel locks the directory of a look-up, so that who invalidates another name in it would wait as long."""
    first, second = digest_of(0), digest_of(0)[:-1] + b"\xff"
    with (
        machines(tmp_path, mode, wait_s=HANG_S) as both,
        ThreadPoolExecutor(1) as pool,
        both.here.client() as client,
    ):
        beside, elsewhere = both.path(second), both.here.mount / "elsewhere"
        with client.blocks(NAMESPACE, bucket="blocks") as blocks:
            assert all(blocks.put([second], [b"a block"], [None]))
        client.create_bucket(elsewhere.name)
        client.put("elsewhere/object", b"bytes")
        assert beside.parent == both.path(first).parent
        assert beside.read_bytes() == b"a block"
        assert (elsewhere / "object").read_bytes() == b"bytes"
        with both.other.paused():
            missed = pool.submit(both.path(first).stat)
            eventually(both.asks, "the look-up asks")
            client.remove(both.here.name(beside))
            client.remove("elsewhere/object")
            eventually(lambda: not (elsewhere / "object").exists(), "the object is gone")
            assert not missed.done()
            with pytest.raises(FileNotFoundError):
                missed.result()
            eventually(lambda: not beside.exists(), "the block is gone")


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("mode", TEST_MODES)
def test_a_stop_answers_who_waits(mode: str, is_killed: bool, tmp_path: Path) -> None:
    """Within STOP_WAIT_S and with no failure, else `stop` raises."""
    with machines(tmp_path, mode) as both:
        path = both.path(digest_of(0))

        def look() -> None:
            with pytest.raises(FileNotFoundError):
                path.stat()

        with both.other.paused():
            caller = start_child(look)
            eventually(both.asks, "the look-up asks")
            if is_killed:
                os.kill(caller, signal.SIGKILL)
            both.here.stop()
            assert wait_child(caller) == (-signal.SIGKILL if is_killed else 0)


@pytest.mark.parametrize("mode", TEST_MODES)
def test_an_unmount_ends_the_service_once_who_waits_is_answered(mode: str, tmp_path: Path) -> None:
    with machines(tmp_path, mode, wait_s=HANG_S) as both:
        path = both.path(digest_of(0))

        def look() -> None:
            with pytest.raises(FileNotFoundError):
                path.stat()

        with both.other.paused():
            caller = start_child(look)
            eventually(both.asks, "the look-up asks")
            done = run_kvfs("umount", str(both.here.mount))
            assert done.returncode == 0, done.stderr
            assert wait_child(caller) == 0
            assert both.here.running.wait(STOP_WAIT_S) == 0

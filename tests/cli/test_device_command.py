"""`kvfs device`, and a service on a block device, from the command line to bytes that outlive a kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import kvfs
from kvfs.limits import MIB
from tests.support.loop_devices import MakeLoop
from tests.support.loop_devices import make_loop as make_loop
from tests.support.service import Service, detach_mounts, run_kvfs


def test_a_service_lives_on_a_device(tmp_path: Path, make_loop: MakeLoop) -> None:
    loop = make_loop(65 * MIB)
    config = tmp_path / "kvfs.toml"
    config.write_text(f'[nvme]\ndevice = "{loop.path}"\n')
    with Service(mode="off", nvme=None, arguments=["--config", str(config)]) as service:
        assert f"65 MiB of disk in {loop.path}" in service.log()
        with kvfs.connect(service.data) as client:
            client.create_bucket("kept", durable=True)
            client.put("kept/object", b"bytes" * 1000)
            assert client.status()["tiers"][1]["segments"] == 63
        refused = run_kvfs("device", "clear", "--force", str(loop.path))
        assert (refused.returncode, "used by another process" in refused.stderr) == (2, True)
        service.kill()
        detach_mounts(service.data / "dram")
        shutil.rmtree(service.data / "index")
        service.start()
        with kvfs.connect(service.data) as client:
            assert bytes(client.get("kept/object")) == b"bytes" * 1000
        service.stop()
        found = run_kvfs("fsck", "--data", str(service.data), "--json")
        assert (found.returncode, json.loads(found.stdout)["problems"]) == (0, []), found.stderr
        shown = run_kvfs("device", "show", str(loop.path))
        store = json.loads((service.data / "format.json").read_text())["store_id"]
        assert shown.stdout == f"{loop.path}: 65 MiB, holds 64 segments, device 0 of store {store}\n"


def test_a_device_is_shown_and_emptied(make_loop: MakeLoop) -> None:
    loop = make_loop(16 * MIB)
    assert run_kvfs("device", "show", str(loop.path)).stdout == f"{loop.path}: 16 MiB, holds nothing\n"
    loop.write(1024, b"theirs")
    shown = run_kvfs("device", "show", "--json", str(loop.path))
    said = {"device": str(loop.path), "size_bytes": 16 * MIB, "holds": "something that is not of kvfs"}
    assert json.loads(shown.stdout) == said
    refused = run_kvfs("device", "clear", str(loop.path))
    assert (refused.returncode, "--force empties it" in refused.stderr) == (1, True), refused
    assert loop.file.read_bytes()[1024:1030] == b"theirs"
    assert run_kvfs("device", "clear", "--force", str(loop.path)).returncode == 0
    assert not any(loop.file.read_bytes())


def test_what_is_no_device_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, why in [
        (tmp_path / "file", "no block device"),
        (tmp_path / "none", "No such file or directory"),
    ]:
        config = tmp_path / "kvfs.toml"
        config.write_text(f'[nvme]\ndevice = ["{path}"]\n')
        for arguments in (["device", "show", str(path)], ["serve", "--config", str(config), "--no-mount"]):
            refused = (
                run_kvfs(*arguments, "--data", str(tmp_path / "data"))
                if "serve" in arguments
                else run_kvfs(*arguments)
            )
            assert refused.returncode == 2, refused
            assert refused.stderr == f"kvfs: [nvme] device = '{path}': {why}\n"
    assert not (tmp_path / "data").exists()
    both = run_kvfs(
        "serve", "--no-mount", "--data", str(tmp_path / "data"), "--config", str(config), "--nvme", "1GiB"
    )
    assert (both.returncode, "capacity cannot be given" in both.stderr) == (2, True), both

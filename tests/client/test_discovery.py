"""Finding kvfs mounts in the kernel's table, and naming what lies on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.client import discovery
from kvfs.errors import InvalidRequest

TABLE = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
90 22 0:50 / /mnt/kvfs rw,nosuid,nodev - fuse.kvfs kvfs rw,user_id=0,group_id=0
91 22 0:51 / /mnt/a\040b\134c rw,nosuid shared:7 master:3 - fuse.kvfs kvfs rw
92 22 0:52 / /mnt/other rw - fuse.sshfs host:/ rw
94 22 0:54 / /mnt/été rw - fuse.kvfs kvfs rw
93 90 0:53 / /mnt/kvfs/inner rw - fuse.kvfs kvfs rw
"""


def test_only_kvfs_mounts_are_found_and_escapes_are_undone() -> None:
    assert discovery.mounts(TABLE) == [
        Path("/mnt/kvfs"),
        Path("/mnt/a b\\c"),
        Path("/mnt/été"),
        Path("/mnt/kvfs/inner"),
    ]


@pytest.mark.parametrize(
    ("path", "mount", "name"),
    [
        ("/mnt/kvfs", "/mnt/kvfs", ""),
        ("/mnt/kvfs/", "/mnt/kvfs", ""),
        ("/mnt/kvfs/bucket", "/mnt/kvfs", "bucket"),
        ("/mnt/kvfs/bucket/a/b", "/mnt/kvfs", "bucket/a/b"),
        ("/mnt/kvfs/bucket/a/", "/mnt/kvfs", "bucket/a/"),
        ("/mnt/kvfs/x/../bucket//a", "/mnt/kvfs", "bucket/a"),
        ("/mnt/kvfs/inner/bucket", "/mnt/kvfs/inner", "bucket"),
        ("/mnt/a b\\c/bucket/k", "/mnt/a b\\c", "bucket/k"),
    ],
)
def test_a_path_is_split_at_its_mount(path: str, mount: str, name: str) -> None:
    assert discovery.locate(path, TABLE) == (Path(mount), name)


def test_a_path_may_lead_to_the_mount_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "link").symlink_to("mnt/bucket")
    table = f"90 22 0:50 / {tmp_path}/mnt rw - fuse.kvfs kvfs rw\n"
    assert discovery.locate(f"{tmp_path}/link/key", table) == (tmp_path / "mnt", "bucket/key")


@pytest.mark.parametrize("path", ["/mnt/kvfsx/bucket", "/mnt/other/bucket", "/"])
def test_a_path_on_no_kvfs_mount_is_refused_with_what_to_do(path: str) -> None:
    with pytest.raises(InvalidRequest, match=r"on no kvfs mount.*--at MOUNT"):
        discovery.locate(path, TABLE)

"""Mounting and unmounting: /dev/fuse, mount(2) and fusermount3, and mounts that a killed service left behind.

Invariant: nothing waits for a mount without a bound, since the service behind it may be killed.

Concurrency: any thread; unmounting may block while the kernel asks this very process.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

from kvfs import limits
from kvfs.errors import ConfigError, DeviceMissing
from kvfs.system import linux

log = logging.getLogger("kvfs.mount")

SOURCE = "kvfs"
KIND = "fuse.kvfs"


def check_device() -> None:
    """Check that there is a FUSE device. Raises DeviceMissing."""
    if not os.path.exists("/dev/fuse"):
        raise DeviceMissing("/dev/fuse is missing: load the fuse module, or give the container the device")


def mount_directly(point: Path, *, allow_other: bool) -> int:
    """Call mount(2), as root does. Raises PermissionError, OSError."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},default_permissions"
    if allow_other:
        options += ",allow_other"
    try:
        linux.mount(SOURCE, point, KIND, linux.MS_NOSUID | linux.MS_NODEV, options)
    except BaseException:
        os.close(device)
        raise
    return device


def mount_by_helper(point: Path, *, allow_other: bool) -> int:
    """Mount with fusermount3, which sends the descriptor over `_FUSE_COMMFD`. Raises DeviceMissing."""
    helper = shutil.which("fusermount3")
    if helper is None:
        raise DeviceMissing("fusermount3 is missing (package fuse3), and mounting without it needs root")
    ours, theirs = socket.socketpair()
    options = f"default_permissions,fsname={SOURCE},subtype=kvfs" + (",allow_other" if allow_other else "")
    with ours, theirs:
        try:
            done = subprocess.run(
                [helper, "-o", options, "--", str(point)],
                env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=limits.STOP_WAIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DeviceMissing(f"fusermount3 has not mounted in {limits.STOP_WAIT_S:g} s") from None
        theirs.close()
        if done.returncode != 0:
            raise DeviceMissing(f"fusermount3: {done.stderr.decode(errors='replace').strip()}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise DeviceMissing("fusermount3 sent no descriptor")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def unmount(point: Path) -> bool:
    """Unmount kvfs from `point`, lazily where it is in use, and return whether nobody has a file of it open any more.

    Nothing is done where nothing is mounted.
    """
    top = linux.top_mount(point)
    if top is None or not top.kind.startswith("fuse"):
        return True
    try:
        linux.unmount(point)
    except PermissionError:
        _unmount_by_helper(point)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        linux.unmount(point, linux.MNT_DETACH)
        return False
    return True


def recover(point: Path) -> bool:
    """Clear mounts that a killed service left at `point`, and return whether there were any.

    Raises ConfigError when a file system is mounted there that answers, or that may only be slow.
    """
    found = False
    while (top := linux.top_mount(point)) is not None and top.kind.startswith("fuse"):
        alive = answers(point)
        if alive is None:
            raise ConfigError(
                f"{point} is in use: {top.source} ({top.kind}) is mounted there and has not answered in "
                f"{limits.ANSWER_WAIT_S:g} s; `kvfs umount {point}` clears it"
            )
        if alive:
            raise ConfigError(f"{point} is in use: {top.source} ({top.kind}) is mounted there and answers")
        log.warning("%s: clearing the mount that a killed service left behind", point)
        abort(point)
        found = True
    return found


def answers(point: Path) -> bool | None:
    """Return whether a service answers for the mount; None when no answer comes within limits.ANSWER_WAIT_S.

    Raises OSError where statfs says anything but that the service is gone.
    """
    said: list[OSError | None] = []

    def ask() -> None:
        try:
            os.statvfs(point)
            said.append(None)
        except OSError as error:
            said.append(error)

    # Nothing interrupts a call that waits for FUSE, so it waits in a thread that may be left behind.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(limits.ANSWER_WAIT_S)
    if not said:
        return None
    if said[0] is None:
        return True
    if said[0].errno in (errno.ENOTCONN, errno.ECONNABORTED):
        return False
    raise said[0]


def abort(point: Path) -> None:
    """Fail every request of the mount at `point`, and unmount it.

    A service that is killed while one of its threads notifies the kernel of a name cannot end: that thread waits for a
    directory's lock, whose holder waits for the service. Only failing the holder's request breaks the circle.
    """
    try:
        linux.unmount(point, linux.MNT_FORCE | linux.MNT_DETACH)
    except PermissionError:
        _unmount_by_helper(point)


def _unmount_by_helper(point: Path) -> None:
    """Try to unmount with fusermount3; a mount that it does not allow to end stays, which the caller sees."""
    command = ["fusermount3", "-u", "-z", "--", str(point)]
    try:
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL, timeout=limits.STOP_WAIT_S)
    except FileNotFoundError:
        pass
    except subprocess.TimeoutExpired:
        log.warning("%s: fusermount3 has not unmounted it in %g s", point, limits.STOP_WAIT_S)

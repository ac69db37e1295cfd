"""A start that fails, at whatever stage, costs nothing: the next one has every object and name, and believes the index.

The start fails in a process of its own, with one function that raises, or without descriptors from one stage on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import pytest

from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.failing_start import MODULE
from tests.support.service import Service, ServiceFailed

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

OBJECTS: Final = 30
IN_THE_STORE: Final = (
    "tiers.recovery.startup.settle_snapshots",
    "tiers.recovery.startup.adopt_orphans",
    "tiers.recovery.startup.skip_ids",
    "tiers.recovery.startup.Startup.build",
    "tiers.recovery.startup.restore_copies",
    "tiers.recovery.startup.Startup._report",
    "tiers.nvme.write_behind.NvmeJournal.settle_start",
)
AROUND_IT: Final = (
    "kvfs.service.open_events",
    "kvfs.service.prepare_mountpoint",
    "kvfs.service._start_gateway",
    "tiers.sessions.server.SessionServer.serve",
    "mounts.mount.Mount.serve",
)


class Failing(Service):
    """A service that may be made to fail."""

    failing: tuple[str, str] | None = None

    def command(self) -> list[str]:
        command = super().command()
        if self.failing is None:
            return command
        return [sys.executable, "-m", MODULE, *self.failing, *command[3:]]

    def said_of_its_end(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.data / "format.json").read_text())
        return found


@pytest.fixture(scope="module")
def service() -> Iterator[Failing]:
    need_mount()
    with Failing(dram="32MiB", nvme="16MiB", arguments=("--slots", "1024")) as running:
        with running.client() as client:
            client.create_bucket("cache")
            client.create_bucket("durable", durable=True)
            for number in range(OBJECTS):
                client.put(f"{'cache' if number % 2 else 'durable'}/{number}", b"%d" % number * 5000)
        yield running


STAGES: Final = [
    *((where, "error", "stopped") for where in IN_THE_STORE + AROUND_IT),
    *((where, "descriptors", "stopped") for where in (*IN_THE_STORE[::3], *AROUND_IT[::4])),
    *((where, "error", "killed") for where in (IN_THE_STORE[0], IN_THE_STORE[-1], AROUND_IT[-1])),
]


@pytest.mark.parametrize(("where", "how", "before"), STAGES)
def test_the_next_start_has_everything(service: Failing, where: str, how: str, before: str) -> None:
    if before == "stopped":
        service.stop()
    else:
        service.kill()
    offset = len(service.log())
    was_clean = service.said_of_its_end()["clean"]
    service.failing = (how, where)
    with suppress(ServiceFailed):
        service.restart()
        assert how == "descriptors", f"the start did not reach {where}"
        service.stop()
    service.failing = None
    said = service.log()[offset:]
    assert "Traceback" not in said, said
    assert service.said_of_its_end()["clean"] >= was_clean, f"after a boot the index would be dropped\n{said}"
    service.restart()
    said = service.log()[offset:]
    with service.client() as client:
        for number in range(OBJECTS):
            name = f"{'cache' if number % 2 else 'durable'}/{number}"
            assert client.get(name) == b"%d" % number * 5000, said
    assert "names rebuilt" not in said, said
    assert "starting with an empty" not in said, said
    assert said.count(f"taken over: {OBJECTS} objects") == said.count("taken over:"), said

"""What a service of the crash tests runs short of: room on its tier or its disk, and memory that others hold.

Responsibility: use it up before each life's work, and have the journal know what was put and removed for that. What is
held outlives the service: the bytes that were opened stay there, whatever becomes of the name.

Concurrency: one test's thread.
"""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress

from kvfs.client import Client
from kvfs.errors import KvfsError, NoSpace, NotFound, QuotaExceeded
from tests.support.service import Service
from tests.support.service_calls import is_gone
from tests.support.service_journal import Contents, Journal, digest_of
from tests.support.service_load import CACHE, DURABLE
from tests.support.service_places import Lease, Place


class Shortage:
    """Uses up what a place runs short of, and holds leases."""

    def __init__(
        self, place: Place, service: Service, chance: random.Random, journal: Journal, contents: Contents
    ) -> None:
        self.place, self.service, self.chance = place, service, chance
        self.journal, self.contents = journal, contents
        self.leases: list[Lease] = []

    def close(self) -> None:
        for lease in self.leases:
            lease.end()

    def wrong(self) -> list[str]:
        """What is held and is no longer what was opened."""
        return [fault for lease in self.leases if (fault := lease.wrong())]

    def fill(self, client: Client) -> None:
        """Use up what this place runs short of."""
        if self.place.full_nvme:
            self._put_until_full(client, f"{DURABLE}/ballast", 200_000, hold=False)
            for name in self.chance.sample(
                [name for name in self.journal.names() if name.startswith(f"{DURABLE}/ballast")], 4
            ):
                begun = self.journal.begin("session remove", {name: None})
                try:
                    client.remove(name)
                except KvfsError as error:
                    if is_gone(error):  # at a crash point: it was removed or not
                        raise
                    self.journal.failed(begun, error)
                else:
                    self.journal.done(begun)
        if self.place.held:
            for lease in self.chance.sample(self.leases, len(self.leases) // 3):
                lease.end()
                self.leases.remove(lease)
            self._put_until_full(client, f"{CACHE}/held", 300_000, hold=True)
        if self.place.full_disk:
            ballast = self.service.data / "ballast"
            ballast.unlink(missing_ok=True)
            free = shutil.disk_usage(self.service.data).free
            spare = self.chance.choice([0, 0, 4096, 65_536, 300_000])
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(4096, free // 4096 * 4096 - spare))

    def _put_until_full(self, client: Client, directory: str, size: int, *, hold: bool) -> None:
        for number in range(400):
            data = self.chance.randbytes(size)
            name = f"{directory}/{self.journal.life}-{number}"
            begun = self.journal.begin("session put", {name: self.contents.note(data)})
            try:
                client.put(name, data)
                self.journal.done(begun)
                if hold:
                    with suppress(NotFound, FileNotFoundError):  # it may be evicted at once
                        self.hold(client, name, digest_of(data))
            except (NoSpace, QuotaExceeded) as error:
                if not begun.done:
                    self.journal.failed(begun, error)
                return

    def hold(self, client: Client, name: str, value: str) -> None:
        """From now on this process has it open, through a session or the mount."""
        if self.chance.random() < 0.7:
            self.leases.append(Lease(name, client.open(name), value, is_slot=True))
        else:
            descriptor = os.open(self.service.mount / name, os.O_RDONLY)
            self.leases.append(Lease(name, descriptor, value, is_slot=False))

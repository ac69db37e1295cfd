"""Histories of puts, evictions and reads on four machines against a plain model: right bytes or a miss, whatever the
directory says. Its server, or all of them, is emptied in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs import limits
from tests.support.directory_cluster import ServerCluster, cluster_of_three
from tests.support.directory_server import (
    DirectoryServer,
    directed_machines,
    directory_server,
    needs_server,
    until_directory_knows,
)
from tests.support.machines import Machine, digest_of, payload_of
from tests.support.seeds import rounds
from tests.support.waits import until

COUNT = 4
NUMBERS = range(21, 253, 21)
"""Of blocks in all parts of a directory: their first bytes are these numbers."""
BLOCKS = st.sampled_from(NUMBERS)
MACHINES = st.integers(0, COUNT - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), MACHINES, BLOCKS),
        st.tuples(st.just("evict"), MACHINES, BLOCKS),
        st.tuples(st.just("read"), MACHINES, st.lists(BLOCKS, min_size=1, max_size=6)),
        st.tuples(st.just("agree"), MACHINES, BLOCKS),
        st.tuples(st.just("empty"), MACHINES, BLOCKS),
    ),
    min_size=5,
    max_size=40,
)


def size_of(number: int) -> int:
    return number * 239


class Model:
    """Which machine has which block; the bytes of a block are the same everywhere."""

    def __init__(self, running: list[Machine], server: DirectoryServer | ServerCluster) -> None:
        self.running, self.server = running, server
        self.has: list[set[int]] = [set() for _ in running]
        self.is_agreed = True

    async def step(self, what: str, at: int, argument: object) -> None:
        if isinstance(argument, list):
            await self._read(at, argument)
        elif what == "put" and argument not in self.has[at]:
            assert isinstance(argument, int)
            self.running[at].put([argument], size_of(argument))
            self.has[at].add(argument)
            self.is_agreed = False
        elif what == "evict" and argument in self.has[at]:
            assert isinstance(argument, int)
            self.running[at].store.remove_block(digest_of(argument))
            self.has[at].remove(argument)
            self.is_agreed = False
        elif what == "empty":
            self.server.empty()
            self.is_agreed = False
        elif what == "agree":
            await self._agree()

    async def _agree(self) -> None:
        """Wait until the directory says what the model says: losses heal."""
        await until_directory_knows(self.running, self.has, NUMBERS)
        self.is_agreed = True

    async def _read(self, at: int, numbers: list[int]) -> None:
        """What is read is right; and where the directory knows all, everything that somebody has is read."""
        machine = self.running[at]
        await machine.fetch([digest_of(number) for number in numbers])
        for number in numbers:
            found, anywhere = machine.read(digest_of(number)), any(number in has for has in self.has)
            if found is not None:
                assert anywhere
                assert found == payload_of(number, size_of(number))
                self.has[at].add(number)
            else:
                assert number not in self.has[at]
                assert not (self.is_agreed and anywhere)
        self.is_agreed = False

    def check(self) -> None:
        for machine, has in zip(self.running, self.has, strict=True):
            assert machine.drafts() == 0
            for number in NUMBERS:
                expected = payload_of(number, size_of(number)) if number in has else None
                assert machine.read(digest_of(number)) == expected


@needs_server
@pytest.mark.parametrize("serving", [directory_server, cluster_of_three], ids=["a server", "three servers"])
@settings(
    max_examples=rounds(4, 8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS)
def test_four_machines_with_a_directory_behave_as_the_model(
    tmp_path_factory: pytest.TempPathFactory,
    serving: Callable[[Path], AbstractContextManager[DirectoryServer | ServerCluster]],
    steps: list[tuple[str, int, object]],
) -> None:
    async def run(folder: Path) -> None:
        with serving(folder / "directory") as server:
            async with directed_machines(folder, COUNT, server.url) as running:
                model = Model(running, server)
                for what, at, argument in [*steps, ("agree", 0, 1)]:
                    await model.step(what, at, argument)
                await until(lambda: all(each.directory()["pending"] == 0 for each in running))
                model.check()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECTORY_BEAT_S", 0.05)
        trio.run(run, tmp_path_factory.mktemp("model"))

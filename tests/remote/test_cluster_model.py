"""Three machines against a plain model: a hit with the right bytes, or a miss, whatever happened before."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.machines import Machine, digest_of, machines, payload_of
from tests.support.seeds import rounds

COUNT = 3
BLOCKS = st.integers(1, 12)
MACHINES = st.integers(0, COUNT - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), MACHINES, BLOCKS),
        st.tuples(st.just("evict"), MACHINES, BLOCKS),
        st.tuples(st.just("fetch"), MACHINES, st.lists(BLOCKS, min_size=1, max_size=6)),
        st.tuples(st.just("both"), MACHINES, st.lists(BLOCKS, min_size=1, max_size=6)),
    ),
    max_size=30,
)


def size_of(number: int) -> int:
    return number * 7001


class Model:
    """Which machine has which block; the bytes of a block are the same everywhere."""

    def __init__(self, running: list[Machine]) -> None:
        self.running = running
        self.has: list[set[int]] = [set() for _ in running]

    def put(self, at: int, number: int) -> None:
        if number not in self.has[at]:
            self.running[at].put([number], size_of(number))
            self.has[at].add(number)

    def evict(self, at: int, number: int) -> None:
        if number in self.has[at]:
            self.running[at].store.remove_block(digest_of(number))
            self.has[at].remove(number)

    async def fetch(self, at: int, numbers: list[int]) -> None:
        """A peer gives what it has of the missing ones without a gap from the first on; the model knows that, too."""
        missing = [number for number in dict.fromkeys(numbers) if number not in self.has[at]]
        longest = max(self._leading(peer, missing) for peer in range(COUNT) if peer != at)
        here = await self.running[at].fetch([digest_of(number) for number in numbers])
        self.has[at].update(missing[:longest])
        assert here == sum(number in self.has[at] for number in numbers)

    def _leading(self, peer: int, missing: list[int]) -> int:
        return next((i for i, number in enumerate(missing) if number not in self.has[peer]), len(missing))

    def check(self) -> None:
        for machine, has in zip(self.running, self.has, strict=True):
            assert machine.drafts() == 0
            for number in range(1, 13):
                expected = payload_of(number, size_of(number)) if number in has else None
                assert machine.read(digest_of(number)) == expected


@settings(
    max_examples=rounds(8, 15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(STEPS)
def test_three_machines_behave_as_the_model(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, object]]
) -> None:
    async def run(folder: Path) -> None:
        async with machines(folder, COUNT) as running:
            model = Model(running)
            for what, at, argument in steps:
                if isinstance(argument, int):
                    (model.put if what == "put" else model.evict)(at, argument)
                elif isinstance(argument, list):
                    async with trio.open_nursery() as nursery:
                        if (
                            what == "both"
                        ):  # the same blocks asked for by another machine's user at the same time
                            nursery.start_soon(running[at].fetch, [digest_of(n) for n in argument])
                        nursery.start_soon(model.fetch, at, argument)
            model.check()

    trio.run(run, tmp_path_factory.mktemp("model"))

"""The index of who holds which blocks: against sets, and whose prefill is a block's producer."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from scheduler.routing.prefix_index import PrefixIndex, Run
from tests.support.clusters import ready_job


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 3)), max_size=60),
    st.lists(st.integers(0, 12), unique=True, max_size=10),
)
def test_the_index_against_sets(changes: list[tuple[bool, int, int]], prompt: list[int]) -> None:
    index = PrefixIndex()
    model: dict[int, set[int]] = {}
    for add, block, source in changes:
        if add:
            index.add(block, source)
            model.setdefault(block, set()).add(source)
        else:
            index.invalidate(block, source)
            model.get(block, set()).discard(source)
    runs = index.runs(prompt)
    held = [mask for run in runs for mask in [run.holders] * run.blocks]
    expected = []
    for block in prompt:
        if not model.get(block):
            break
        expected.append(sum(1 << source for source in model[block]))
    assert held == expected
    assert all(one.holders != other.holders for one, other in pairwise(runs))
    assert len(index) == sum(1 for holders in model.values() if holders)


def test_a_producer_is_known_until_it_is_done_or_its_blocks_leave() -> None:
    index, producer = PrefixIndex(), ready_job(0, service_s=1.0)
    for block in (1, 2, 3):
        index.add(block, 0, producer)
    index.invalidate(3, 0)
    index.add(3, 1)
    assert index.runs((1, 2, 3)) == (Run(1, 2, producer), Run(2, 1, None))
    index.produced((1, 2, 3), producer)
    assert index.runs((1, 2)) == (Run(1, 2, None),)


def test_of_several_that_make_a_block_the_one_that_ends_first_is_its_producer() -> None:
    index = PrefixIndex()
    long, short, other = (ready_job(n, service_s=1.0) for n in range(3))
    long.finish_s, short.finish_s, other.finish_s = 24.0, 3.0, 5.0
    for block in (1, 2, 3):
        index.add(block, 0, long)
    for source, job in ((1, short), (2, other)):
        for block in (1, 2):
            index.add(block, source, job)
    assert index.runs((1, 2, 3)) == (Run(0b111, 2, short), Run(0b001, 1, long))
    short.finish_s = 30.0  # it is late: what the others were predicted counts, as natively
    index.add(2, 3, other)
    assert index.producer(2) is short
    index.stored(2, 2)
    index.produced((1,), short)
    assert index.runs((1, 2, 3)) == (Run(0b111, 1, None), Run(0b1111, 1, None), Run(0b001, 1, long))
    index.add(1, 3, short)
    assert index.producer(1) is None, "it is there, and is made once more"

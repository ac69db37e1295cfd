"""The queue of calls from the native loop, over a loop that a test fills."""

from __future__ import annotations

from typing import cast

from kvfs._native.fuse.loop import Call, FuseLoop
from mounts.kernel.call_queue import LoopCalls


class Loop:
    """Calls, taken two at a time."""

    def __init__(self, count: int) -> None:
        self.queued = list(range(count))

    @property
    def calls_waiting(self) -> bool:
        return bool(self.queued)

    def take_calls(self) -> list[int]:
        taken, self.queued = self.queued[:2], self.queued[2:]
        return taken


def queue_of(loop: Loop) -> LoopCalls:
    return LoopCalls(cast(FuseLoop, loop))


def test_calls_stay_queued_while_nobody_handles_them() -> None:
    loop = Loop(3)
    queue = queue_of(loop)
    queue.catch_up()
    assert queue.is_behind()
    with queue.handled_by(lambda call: None, lambda: None):
        pass
    queue.catch_up()
    assert loop.queued == [0, 1, 2]


def test_all_calls_are_handled_in_their_order_and_then_it_is_said_once() -> None:
    queue, seen = queue_of(Loop(5)), list[object]()
    with queue.handled_by(seen.append, lambda: seen.append("caught up")):
        queue.catch_up()
        assert not queue.is_behind()
        queue.catch_up()
    assert seen == [0, 1, 2, 3, 4, "caught up"]


def test_a_limit_ends_between_two_takes() -> None:
    queue, seen = queue_of(Loop(5)), list[object]()
    with queue.handled_by(seen.append, lambda: seen.append("caught up")):
        queue.catch_up(3)
        assert seen == [0, 1, 2, 3]
        assert queue.is_behind()


def test_a_call_that_catches_up_handles_no_other_before_its_own_end() -> None:
    queue, seen = queue_of(Loop(3)), list[object]()

    def handle(call: Call) -> None:
        queue.catch_up()
        assert queue.is_behind()
        seen.append(call)

    with queue.handled_by(handle, lambda: None):
        queue.catch_up()
    assert seen == [0, 1, 2]

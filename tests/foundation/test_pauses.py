"""Pauses after failures."""

from __future__ import annotations

from kvfs.system.pauses import Pause


def test_pauses_double_up_to_their_bound_however_many_failures_there_are() -> None:
    pause = Pause(0.5, 30.0)
    assert pause.is_over(0.0)
    assert [pause.failed(0.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert {pause.failed(100.0) for _ in range(5000)} == {30.0}
    assert not pause.is_over(129.9)
    assert pause.is_over(130.0)
    pause.succeeded()
    assert pause.failed(0.0) == 0.5


def test_the_spread_moves_a_pause_and_not_the_next_ones() -> None:
    pause = Pause(1.0, 4.0, spread=0.5)
    for middle_s in (1, 2, 4, 4):
        assert 0.5 * middle_s <= pause.failed(0.0) <= 1.5 * middle_s

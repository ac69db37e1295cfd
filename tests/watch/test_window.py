"""Counters over the last seconds: growth, rates, shares, quantiles."""

from __future__ import annotations

import pytest

from kvfs.limits import WATCH_WINDOW_S
from kvfs.system.latencies import Latencies
from kvfs.watch.window import Window


def at(window: Window, now_s: float) -> Window:
    window.begin(now_s)
    return window


def test_before_a_second_sample_everything_counts_from_the_start() -> None:
    window = at(Window(), 100.0)
    assert (window.seconds, window.growth("a", 7), window.rate("b", 7)) == (0.0, 7, None)
    assert window.share("c", 1, 3) == 0.25


def test_growth_is_that_of_the_window_and_no_more_samples_are_kept_than_fit_it() -> None:
    window = Window()
    for second in range(100):
        at(window, second).growth("a", second**2)
        assert len(window._samples) <= WATCH_WINDOW_S + 1
    window.begin(100)
    assert window.seconds == WATCH_WINDOW_S
    assert window.growth("a", 10_000) == 10_000 - 90**2
    assert at(window, 101).rate("a", 10_100) == (10_100 - 91**2) / WATCH_WINDOW_S


def test_a_counter_that_went_back_began_anew_and_one_that_comes_later_began_at_0() -> None:
    window = Window()
    at(window, 0).growth("a", 1_000)
    window.begin(1)
    assert (window.growth("a", 30), window.growth("new", 4)) == (30, 4)


def test_nothing_has_no_share_and_no_quantile() -> None:
    window = Window()
    for second in range(2):
        window.begin(second)
        shown = window.share("s", 5, 5), window.histogram("h", {"buckets": {"0.01": 3}})
    assert shown == (None, (0, None, None))


@pytest.mark.parametrize(("fast", "slow", "expected"), [(99, 1, (0.0001, 0.0001)), (98, 2, (0.0001, 0.25))])
def test_quantiles_are_the_bounds_of_their_buckets(
    fast: int, slow: int, expected: tuple[float, float]
) -> None:
    latencies = Latencies()
    window = Window()
    latencies.observe("read", 50.0)
    for second in range(2):
        window.begin(second)
        shown = window.histogram("read", latencies.status()["read"])
        for duration_s, count in ((0.00009, fast), (0.2, slow)):
            for _ in range(count):
                latencies.observe("read", duration_s)
    assert shown == (100, *expected)


def test_what_is_above_all_bounds_has_no_quantile() -> None:
    window = at(Window(), 0)
    assert window.histogram("h", {"buckets": {"+Inf": 3}}) == (3, None, None)

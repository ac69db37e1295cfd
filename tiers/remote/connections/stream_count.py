"""How many streams a peer's bytes come over: as many as bring most.

Responsibility: from when reads begin and end, and what they bring, the rate over so many streams; now and then twice or
half as many are tried.

Invariants:
- From one stream to limits.MAX_REMOTE_STREAMS. While there are fewer than there are to be, nothing is measured; where
  no more can be had, a trial proves nothing, and those that there are have to do.
- Only time with reads counts, and only stretches of it that had a read on each stream at some time: others say nothing
  of the number. A stretch counts from pause to pause, or from the middle of reads to the middle of reads: what had
  begun before is made up for then by what has not ended.
- What is tried is measured between two windows of what was there before, so that a peer which becomes faster or slower
  meanwhile proves nothing, and twice in a row before it stays. Twice as many stay where they bring a tenth more; half
  as many where they bring no less: each is a connection and a thread at either end. What was tried in vain, or cannot
  be measured, is tried less often.

Concurrency: plain state for one thread, which says what time it is.
"""

from __future__ import annotations

from enum import Enum, auto

from kvfs import limits

_GAIN = 1.1
_TRIALS = 2
_PAUSE_S = 0.01
"""What is shorter between two reads is no pause: without it, one stream would seem to have none."""
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 256
"""Windows between two trials."""
_LONG_STRETCH = 8
"""Windows after which a stretch without a pause ends: one of two, of reads of many sizes, is off by more than _GAIN."""
_LONG_BURST = 32
"""The same of one that began after a pause, which counts if there is another one within so many: as many blocks as a
fetch may have, of 4 MiB."""
_IN_VAIN, _IN_VAIN_UNEVEN = 2, 64
"""Windows after which a trial is given up: of reads that do not fill the streams, or in stretches that do not count."""


class _Phase(Enum):
    STEADY = auto()
    TRIAL = auto()
    AGAIN = auto()


class StreamCount:
    """The number of streams of one peer."""

    def __init__(self) -> None:
        self.wanted = limits.REMOTE_STREAMS
        """What brings most, as far as is known."""
        self._candidate = self.wanted
        self._there = limits.MAX_REMOTE_STREAMS
        self._reads, self._ended_s = 0, 0.0
        """Under way, and when there was none of late."""
        self._since_s, self._stretch_bytes = 0.0, 0
        self._is_filled, self._began_idle = False, True
        self._bytes, self._busy_s, self._vain = 0, 0.0, 0.0
        """Of the window."""
        self._settling = 0
        """Reads that are to end before a stretch begins: they were begun with another number, or beside such."""
        self._phase, self._won = _Phase.STEADY, 0
        self._before = self._tried = 0.0
        self._upwards = True
        self._pause = self._left = _FIRST_PAUSE

    @property
    def count(self) -> int:
        """Return how many there are to be."""
        return self._candidate if self._phase is _Phase.TRIAL else self.wanted

    def began(self, now_s: float) -> None:
        """Note that a read has begun."""
        if self._reads == 0:
            if self._bytes and now_s - self._ended_s < _PAUSE_S:
                self._busy_s += now_s - self._ended_s
            self._begin_stretch(now_s)
        self._reads += 1
        self._is_filled |= self._reads >= self.count

    def brought(self, size_bytes: int) -> None:
        """Note bytes that a read has brought, before its end."""
        self._stretch_bytes += size_bytes

    def ended(self, now_s: float) -> None:
        """Note that a read has ended; `count` may be another one then."""
        self._reads -= 1
        self._ended_s = now_s
        if self._settling:
            self._settling -= 1
            self._begin_stretch(now_s)
        else:
            longest = _LONG_BURST if self._began_idle else _LONG_STRETCH
            if not self._reads or self._stretch_bytes >= longest * limits.REMOTE_STREAM_WINDOW_BYTES:
                self._end_stretch(now_s)

    def note_there(self, streams: int) -> None:
        """Note how many reads there may be at once: a window begins anew with the stream that was missing."""
        was_short = self._is_short
        self._there = streams
        if was_short and not self._is_short:
            self._settle()

    def give_up(self) -> None:
        """Do with the streams that there are."""
        self.end_trial()
        if self._there < self.wanted:
            self.wanted = self._there
            self._settle()

    def end_trial(self) -> None:
        """End a trial, if there is one: it proves nothing."""
        if self._phase is not _Phase.STEADY:
            self._try_later()
            self._settle()

    @property
    def _is_short(self) -> bool:
        return self._there < self.count

    def _begin_stretch(self, now_s: float) -> None:
        self._since_s, self._stretch_bytes = now_s, 0
        self._is_filled, self._began_idle = False, self._reads == 0

    def _end_stretch(self, now_s: float) -> None:
        if not self._is_short:
            self._count_stretch(now_s)
        self._begin_stretch(now_s)
        window_bytes = limits.REMOTE_STREAM_WINDOW_BYTES
        if self._bytes >= window_bytes and self._busy_s >= limits.REMOTE_STREAM_WINDOW_S:
            rate = self._bytes / self._busy_s
            self._bytes, self._busy_s, self._vain = 0, 0.0, 0.0
            self._measured(rate)
        elif self._vain >= window_bytes:
            self.end_trial()

    def _count_stretch(self, now_s: float) -> None:
        ends_idle = self._reads == 0
        if not self._is_filled:
            self._vain += self._stretch_bytes / _IN_VAIN
        elif ends_idle is self._began_idle:
            self._bytes += self._stretch_bytes
            self._busy_s += now_s - self._since_s
        else:
            self._vain += self._stretch_bytes / _IN_VAIN_UNEVEN

    def _settle(self) -> None:
        """Begin a window anew, with another number."""
        self._settling = 2 * max(self._reads, self.count)
        self._bytes, self._busy_s, self._vain = 0, 0.0, 0.0

    def _measured(self, rate: float) -> None:
        """Take the rate of a window, in bytes per second."""
        if self._phase is _Phase.STEADY:
            self._before, self._left = rate, self._left - 1
            if self._left <= 0:
                self._candidate = self._choose()
                self._enter(_Phase.TRIAL)
        elif self._phase is _Phase.TRIAL:
            self._tried = rate
            self._enter(_Phase.AGAIN)
        else:
            self._decide(rate)

    def _decide(self, rate: float) -> None:
        gain = _GAIN if self._candidate > self.wanted else 1.0
        if self._tried < gain * max(self._before, rate):
            self._try_later()
            return
        self._before, self._won = rate, self._won + 1
        if self._won < _TRIALS:
            self._enter(_Phase.TRIAL)
            return
        self.wanted, self._won = self._candidate, 0
        self._pause = self._left = _FIRST_PAUSE
        self._enter(_Phase.STEADY)

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._settle()

    def _try_later(self) -> None:
        """End a trial in vain: the other direction is next."""
        self._phase, self._won = _Phase.STEADY, 0
        self._upwards = not self._upwards
        self._pause = self._left = min(2 * self._pause, _LONGEST_PAUSE)

    def _choose(self) -> int:
        """Return the number to try next; in the other direction where there is none in this one."""
        if self.wanted == (limits.MAX_REMOTE_STREAMS if self._upwards else 1):
            self._upwards = not self._upwards
        if self._upwards:
            return min(2 * self.wanted, limits.MAX_REMOTE_STREAMS)
        return self.wanted // 2

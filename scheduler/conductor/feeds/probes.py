"""What instances say of themselves at `/metrics`: since when they run, how much they do.

Responsibility: one bounded GET, and the few numbers that matter of vLLM's and SGLang's metrics. An idle engine sends no
events, since they leave in a step, so its start time and its sleep are the signs that its cache is gone.

Concurrency: pure functions, and one task per call of `get`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trio

from kvfs.http.bounded_get import GetFailed, get
from kvfs.limits import MAX_METRICS_BYTES, PROBE_WAIT_S
from scheduler.conductor.values import EngineMetrics


class ProbeFailed(Exception):
    """An instance does not answer, or not with metrics."""


_REQUESTS = frozenset(
    (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
    )
)


def parse_metrics(text: str, rank: int | None = None) -> EngineMetrics:
    """Read Prometheus's text format; lines that are not understood are passed over.

    `rank`: the data-parallel rank whose numbers are wanted; None: those of all, together.
    """
    started_s: float | None = None
    requests: float | None = None
    is_asleep = False
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name == "process_start_time_seconds":
            started_s = _value(line)
        elif not _is_of(line, rank):
            continue
        elif name in _REQUESTS:
            requests = (requests or 0.0) + (_value(line) or 0.0)
        elif name == "vllm:engine_sleep_state" and 'sleep_state="awake"' in line:
            is_asleep = is_asleep or _value(line) == 0
    return EngineMetrics(started_s, None if requests is None else int(requests), is_asleep)


def _is_of(line: str, rank: int | None) -> bool:
    """Return whether a sample is of this rank: vLLM labels each one with its number."""
    return rank is None or f'{{engine="{rank}"' in line or f',engine="{rank}"' in line


def _value(line: str) -> float | None:
    try:
        value = float(line.rpartition("}")[2].split()[-1 if "}" not in line else 0])
    except (ValueError, IndexError):
        return None
    return value if 0 <= value < 1e15 else None


async def probe(
    url: str, ranks: Sequence[int | None] = (None,), authorities: Path | None = None
) -> list[EngineMetrics]:
    """Look at the metrics of the instances at `url`, one for each of `ranks`; `authorities`: see `client_context`.

    Raises ProbeFailed.
    """
    with trio.move_on_after(PROBE_WAIT_S):
        try:
            found = await get(url.rstrip("/") + "/metrics", MAX_METRICS_BYTES, authorities=authorities)
        except GetFailed as error:
            raise ProbeFailed(str(error)) from None
        text = found.decode(errors="replace")
        return [parse_metrics(text, rank) for rank in ranks]
    raise ProbeFailed(f"no answer in {PROBE_WAIT_S} s")

"""A Conductor as figures and tables.

Responsibility: a `Snapshot` of instances, streams, tokens by where they were cached, latencies against limits, refusals
and the decisions that changed; and what is wrong. Concurrency: the Conductor's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvfs.limits import MAX_PANEL_ROWS
from kvfs.watch.panels import Column, Figure, Panel, Row, Snapshot, first_problems
from kvfs.watch.window import Window
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.decision_log import REMOTE, Logged
from scheduler.conductor.pool import EXPECTED

DECISION_COLUMNS: Final = (
    Column("id"),
    Column("time", "time"),
    Column("model"),
    Column("tokens"),
    Column("outcome"),
    Column("decode"),
    Column("prefill"),
    Column("predicted cached"),
    Column("cached"),
    Column("predicted TTFT", "s"),
    Column("TTFT", "s"),
    Column("TTFT limit", "s"),
    Column("TBT", "s"),
    Column("TBT limit", "s"),
)
_COUNTS: Final = {
    "routed": "Routed",
    "refused": "Refused",
    "deferred": "Told to wait",
    "degraded": "Routed by load alone",
    "done": "Done",
    "cancelled": "Cancelled",
}
_MEDIA: Final = {EXPECTED: "prefills under way", REMOTE: "other nodes"}
_EMPTY: Final[Mapping[str, Any]] = {"buckets": {}}


def conductor_snapshot(conductor: Conductor, window: Window, *, changed: bool = False) -> Snapshot:
    """Return what is shown of a Conductor; `changed`: with the decisions that changed since it was last so called."""
    at_s = time.time()
    window.begin(at_s)
    status = conductor.status()
    found = status["decisions"]
    return Snapshot(
        kind="conductor",
        name="Conductor",
        at_s=at_s,
        window_s=window.seconds,
        problems=first_problems(_problems(status, window)),
        panels=(
            _requests(status, window),
            _cache(found, status["counts"], window),
            _latencies(found, window),
            _refusals(found["refused"], window),
            _instances(status["instances"]),
            _streams(status["streams"]),
            *(() if status["roles"] is None else (_roles(status["roles"]),)),
        ),
        decisions=_changed(conductor) if changed else None,
    )


def decision_panel(conductor: Conductor) -> Panel:
    """Return the last decisions, the first one first."""
    return _decisions(conductor, conductor.log.all())


def _changed(conductor: Conductor) -> Panel:
    found, omitted = conductor.log.take_changed()
    note = f"{omitted} decisions of this second were too many to show" if omitted else ""
    return _decisions(conductor, found, note)


def _decisions(conductor: Conductor, found: Iterable[Logged], note: str = "") -> Panel:
    calendar_s = time.time() - conductor.now_s()
    return Panel(
        title="Decisions",
        note=note,
        columns=DECISION_COLUMNS,
        rows=tuple(_decision(each, calendar_s) for each in found),
    )


def _decision(found: Logged, calendar_s: float) -> Row:
    return (
        found.id,
        found.at_s + calendar_s,
        found.model,
        found.tokens,
        found.outcome,
        found.decode,
        found.prefill,
        found.predicted_tokens,
        found.cached_tokens,
        found.predicted_ttft_s,
        found.ttft_s,
        found.slo.ttft_s,
        found.tbt_s,
        found.slo.tbt_s,
    )


def _requests(status: Mapping[str, Any], window: Window) -> Panel:
    figures = [Figure(title="In flight", value=status["reservations"], charted=True)]
    for key, title in _COUNTS.items():
        count = status["counts"].get(key, 0)
        rate = window.rate(key, count)
        if rate is None:
            figures.append(Figure(title=title, value=count))
        else:
            figures.append(Figure(title=title, value=rate, unit="per_s", charted=True))
    expired = window.growth("expired", status["expired"])
    return Panel(title="Requests", figures=(*figures, Figure(title="Expired", value=expired)))


def _cache(found: Mapping[str, Any], counts: Mapping[str, int], window: Window) -> Panel:
    prompt = window.growth("prompt tokens", found["prompt_tokens"])
    reused = {
        medium: window.growth(f"reused of {medium}", tokens)
        for medium, tokens in found["reused_tokens"].items()
    }
    predicted = window.growth("predicted", counts.get("predicted_tokens", 0))
    reported = window.growth("reported", counts.get("cached_tokens", 0))
    return Panel(
        title="Cache",
        note="Shares of the prompts' tokens. Predicted and reported: of requests whose engine said what it reused.",
        figures=(
            Figure(title="Hit ratio", value=_share(sum(reused.values()), prompt), unit="share", charted=True),
            *(
                Figure(title=f"from {_MEDIA.get(medium, medium)}", value=_share(tokens, prompt), unit="share")
                for medium, tokens in reused.items()
            ),
            Figure(title="Predicted cached tokens", value=predicted),
            Figure(title="Reported cached tokens", value=reported),
        ),
    )


def _share(part: float, of: float) -> float | None:
    return part / of if of > 0 else None


def _latencies(found: Mapping[str, Any], window: Window) -> Panel:
    rows: list[Row] = []
    for name in ("ttft", "tbt"):
        count, median_s, most_s = window.histogram(name, found["latencies"].get(name, _EMPTY))
        late = window.growth(f"late {name}", found["late"][name])
        rows.append((name.upper(), count, median_s, most_s, late, _share(late, count)))
    return Panel(
        title="Latency",
        note="As clients report first tokens and ends. Late: over the limit of the request.",
        columns=(
            Column("latency"),
            Column("requests"),
            Column("median", "s"),
            Column("99 %", "s"),
            Column("late"),
            Column("late of all", "share"),
        ),
        rows=tuple(rows),
    )


def _refusals(refused: Mapping[str, int], window: Window) -> Panel:
    return Panel(
        title="Refusals",
        columns=(Column("reason"), Column("rate", "per_s"), Column("so far")),
        rows=tuple(
            (reason, window.rate(f"refused {reason}", count), count) for reason, count in refused.items()
        ),
    )


def _instances(instances: Sequence[Mapping[str, Any]]) -> Panel:
    rows = tuple(
        (
            each["name"],
            instance_state(each),
            each["queued"],
            each["queue_s"],
            each["active_requests"],
            each["active_tokens"],
            each["requests"],
            each["role"],
            each["model"],
            each["shortfalls"],
            each["url"],
        )
        for each in instances[:MAX_PANEL_ROWS]
    )
    return Panel(
        title="Instances",
        columns=(
            Column("instance"),
            Column("state"),
            Column("queued"),
            Column("queue", "s"),
            *map(Column, ("active", "context tokens", "requests", "role", "model", "shortfalls", "url")),
        ),
        rows=rows,
    )


def _roles(found: Mapping[str, Any]) -> Panel:
    titles = {"ordered": "Orders", "relabelled": "Relabelled", "ended": "Orders ended before"}
    return Panel(
        title="Roles",
        note="Pressure 1: a side is as loaded as it may be. Orders are among the decisions.",
        figures=tuple(
            Figure(title=title, value=found["counts"].get(key, 0)) for key, title in titles.items()
        ),
        columns=tuple(map(Column, ("model", "role", "instances", "pressure"))),
        rows=tuple(tuple(each.values()) for each in found["sides"][:MAX_PANEL_ROWS]),
    )


def instance_state(instance: Mapping[str, Any]) -> str:
    """Return what keeps an instance from work, or `ready`."""
    if not instance["reachable"]:
        return "unreachable"
    return "draining" if instance["draining"] else "distrusted" if instance["distrusted"] else "ready"


def _streams(streams: Sequence[Mapping[str, Any]]) -> Panel:
    rows = tuple(
        (
            each["stream"],
            each["knowledge"],
            each["silent_s"],
            ", ".join(f"{count} {medium}" for medium, count in each["blocks"].items()) or "no blocks",
        )
        for each in streams[:MAX_PANEL_ROWS]
    )
    more = len(streams) - len(rows)
    return Panel(
        title="Streams of events",
        note=f"and {more} more" if more else "",
        columns=(Column("stream"), Column("known"), Column("silent", "s"), Column("blocks")),
        rows=rows,
    )


def _problems(status: Mapping[str, Any], window: Window) -> Iterator[str]:
    """Yield what needs somebody's attention."""
    if not status["instances"]:
        yield "no instance is registered"
    for each in status["instances"]:
        state = instance_state(each)
        if state == "unreachable":
            yield f"{each['name']} is passed over: {each['down'] or 'it failed a request'}"
        elif state == "distrusted":
            yield f"{each['name']} had less cached than its events said: its blocks do not count"
    for each in status["streams"]:
        if each["knowledge"] == "partial":
            yield f"{each['stream']}: batches of events were lost, so not all of its blocks are known"
        elif each["knowledge"] == "unknown":
            yield f"{each['stream']}: nothing was heard of it, so nothing is known of its cache"
        elif each["knowledge"] == "mute":
            yield f"{each['stream']}: it said nothing of blocks that its engine made: its blocks do not count"
    for topic, count in status["unregistered"].items():
        yield f"{topic}: {count} batches of events came, but no instance is registered for this topic"
    without = window.growth("without tokens lately", status["counts"].get("without_tokens", 0))
    degraded = window.growth("degraded lately", status["counts"].get("degraded", 0)) - without
    if degraded > 0:
        yield f"{degraded:.0f} requests were routed by load alone, since nothing was known of any cache"
    if without:
        yield f"{without:.0f} requests were routed by load alone, since their prompts came without tokens"

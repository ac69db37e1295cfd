"""What one gateway process counts, in Prometheus's text form.

Responsibility: requests by operation, failures by code, bytes sent; beside the service's own numbers (`kvfs.metrics`).
Concurrency: one thread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Since the process began."""

    requests: Counter[str] = field(default_factory=Counter)
    """By the name of the operation."""
    errors: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    front_reads: int = 0
    """Requests that were answered without Python (`gateway.front`); they are in `requests` too."""
    front_writes: int = 0
    """Those that were recognised without it."""

    def failed(self, code: str) -> None:
        self.errors[code] += 1

    def exposition(
        self,
        *,
        connections: int,
        accepted: int,
        closed_silent: int,
        refused: int,
        given_up: int,
        connected: bool,
    ) -> str:
        """`kvfs_s3_*` in exposition format 0.0.4."""
        lines = _metric("requests_total", "counter", "Authenticated requests.", "operation", self.requests)
        lines += _metric("errors_total", "counter", "Requests that failed.", "code", self.errors)
        for name, kind, text, value in (
            ("sent_bytes_total", "counter", "Bytes of objects sent.", self.sent_bytes),
            ("front_reads_total", "counter", "Reads that were answered without Python.", self.front_reads),
            (
                "front_writes_total",
                "counter",
                "Writes that were recognised without Python.",
                self.front_writes,
            ),
            ("connections", "gauge", "Connections that are open.", connections),
            ("connections_total", "counter", "Connections that were accepted.", accepted),
            (
                "connections_closed_silent_total",
                "counter",
                "Silent connections that were closed for new ones.",
                closed_silent,
            ),
            (
                "connections_refused_total",
                "counter",
                "Connections of addresses that have their share.",
                refused,
            ),
            ("bodies_given_up_total", "counter", "Slow bodies that ended because others waited.", given_up),
            ("connected_bool", "gauge", "1 while there is a session with the service.", int(connected)),
        ):
            lines += [
                f"# HELP kvfs_s3_{name} {text}",
                f"# TYPE kvfs_s3_{name} {kind}",
                f"kvfs_s3_{name} {value}",
            ]
        return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, label: str, values: Counter[str]) -> list[str]:
    lines = [f"# HELP kvfs_s3_{name} {text}", f"# TYPE kvfs_s3_{name} {kind}"]
    return lines + [f'kvfs_s3_{name}{{{label}="{key}"}} {count}' for key, count in sorted(values.items())]

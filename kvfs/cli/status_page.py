"""The page of `kvfs status`: a table of tiers, then counts.

Responsibility: text from the status. Concurrency: none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvfs.cli.output import time_text
from kvfs.config.sizes import format_size


def status_page(status: Mapping[str, Any]) -> None:
    """Print the page of a status."""
    console = Console()
    console.print(_tiers(status))
    console.print(_counts(status))


def cluster_page(cluster: Mapping[str, Any]) -> None:
    """Print the page of a cluster's status."""
    console = Console()
    peers = Table("peer", "", "links", "by", "blocks", "bytes", "misses", "wrong", "deadlines", "failures")
    for peer in cluster["peers"]:
        state = "this machine" if peer["is_self"] else "up" if peer["is_up"] else peer["trouble"]
        counts = [str(peer[key]) for key in ("misses", "mismatches", "deadlines", "failures")]
        peers.add_row(
            peer["address"],
            state,
            str(peer["links"]),
            peer["transport"],
            str(peer["blocks"]),
            format_size(peer["bytes"]),
            *counts,
        )
    console.print(peers)
    console.print(cluster_line(cluster))
    if ends_s := cluster["certificate_ends_s"]:
        console.print(f"certificate until {time_text(ends_s * 10**9)}")
    if "directory" in cluster:
        console.print(_members(cluster["directory"]))
        console.print(directory_line(cluster["directory"]))
    for task in cluster["tasks"]:
        if task["state"] == "runs":
            print(task_line(task))


def tasks_page(tasks: Sequence[Mapping[str, Any]]) -> None:
    """Print each task, with why blocks failed: plain lines, since a reason has brackets that rich would take away."""
    for task in tasks:
        print(task_line(task))
        for reason, blocks in task["failures"]:
            print(f"  {blocks} blocks: {reason}")


def task_line(task: Mapping[str, Any]) -> str:
    """Say in one line how far a task is, or how it ended."""
    to = f" to {task['to']}" if task["to"] else ""
    removed = f", {task['removed_blocks']} removed here" if task.get("removed_blocks") else ""
    line = (
        f"{task['name']} {task['number']}{to} {task['state']}: {task['blocks']} of {task['of_blocks']} blocks, "
        f"{format_size(task['bytes'])} of {format_size(task['of_bytes'])}, {task['failed_blocks']} failed, "
        f"{format_size(task['bytes_s'])} a second{removed}"
    )
    return f"{line}; {task['said']}" if task["said"] else line


def _members(directory: Mapping[str, Any]) -> Table:
    members = Table("member", "", "since", "blocks", "behind", "trouble")
    for member in directory["members"]:
        members.add_row(
            member["address"],
            "this machine" if member["is_self"] else "",
            time_text(member["epoch"] * 1000),
            str(member["blocks"]),
            f"{member['lag_s'] or 0:.1f} s",
            member["trouble"] or "",
        )
    return members


def directory_line(directory: Mapping[str, Any]) -> str:
    """Say in one line how this machine stands with the directory."""
    up = "up" if directory["is_up"] else "down"
    line = (
        f"directory {directory['server']} {up}, {directory['state']} with epoch {directory['epoch']}; "
        f"{directory['pending']} changes wait, the oldest for {directory['lag_s']:.1f} s"
    )
    return f"{line}; {directory['trouble']}" if directory["trouble"] else line


def cluster_line(cluster: Mapping[str, Any]) -> str:
    """Say in one line what was read and served."""
    up, peers = cluster["peers_up"], cluster["peers_configured"]
    fetched = f"{up} of {peers} peers up, {format_size(cluster['fetched_bytes'])} read from them"
    if "served_bytes" not in cluster:
        return f"{fetched}; serves none"
    return (
        f"{fetched}, {format_size(cluster['served_bytes'])} served over {cluster['connections']} connections"
    )


def _tiers(status: Mapping[str, Any]) -> Table:
    tiers = Table(
        "tier", "on", "used", "of", "", "held", "slots", title=status["data_dir"], title_justify="left"
    )
    for column in (2, 3, 4, 5, 6):
        tiers.columns[column].justify = "right"
    for tier in status["tiers"]:
        share = tier["used_bytes"] / tier["capacity_bytes"]
        tiers.add_row(
            tier["name"],
            tier["backing"],
            format_size(tier["used_bytes"]),
            format_size(tier["capacity_bytes"]),
            f"{share:.0%}",
            format_size(tier["held_bytes"]) if "held_bytes" in tier else "",
            f"{tier['slots']} of {tier['max_slots']}" if "slots" in tier else f"{tier['objects']} objects",
        )
    return tiers


def _counts(status: Mapping[str, Any]) -> Table:
    counts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    mount = status.get("mount")
    if mount is not None:
        counts.add_row("mount", f"{mount['path']}, {mount['mode']}" if mount["path"] else "none")
        for lack in mount["missing"]:
            counts.add_row("missing", lack)
    objects, blocks, buckets = status["objects"], status["blocks"], status["buckets"]
    counts.add_row("holds", f"{objects} objects, {blocks} blocks, {buckets} buckets")
    counts.add_row("reads", f"{status['hits']} hits, {status['misses']} misses")
    seals, removals, evictions = status["seals"], status["removals"], status["evictions"]
    counts.add_row("writes", f"{seals} seals, {removals} removals, {evictions} evictions")
    for tier in status["tiers"]:
        if tier["name"] == "nvme":
            _nvme_rows(counts, tier)
        if tier["name"] == "cold":
            _cold_rows(counts, tier)
    if "hbm" in status:
        _hbm_rows(counts, status["hbm"])
    if status.get("scrub", {}).get("rate_bytes_s"):
        counts.add_row("scrub", _scrub_text(status["scrub"]))
    if "cluster" in status:
        counts.add_row("cluster", cluster_line(status["cluster"]))
        if "directory" in status["cluster"]:
            counts.add_row("directory", directory_line(status["cluster"]["directory"]))
    counts.add_row("sessions", f"{status['sessions']}, with {status['session_drafts']} drafts")
    return counts


def _hbm_rows(counts: Table, hbm: Mapping[str, Any]) -> None:
    for lack in hbm["missing"]:
        counts.add_row("missing", lack)
    used, capacity = format_size(hbm["used_bytes"]), format_size(hbm["capacity_bytes"])
    counts.add_row(
        "GPU memory",
        f"{used} of {capacity} on {len(hbm['devices'])} devices, {hbm['blocks']} blocks, {hbm['clients']} processes; "
        f"{hbm['hits']} hits, {hbm['misses']} misses",
    )


def _scrub_text(scrub: Mapping[str, Any]) -> str:
    damaged = scrub["damaged_extents"] + scrub["damaged_slots"] + scrub["unreadable"]
    last = scrub["last_finished_s"]
    finished = "" if last is None else f", the last ended {time_text(int(last * 1e9))}"
    return (
        f"{format_size(scrub['verified_bytes'])} verified, {damaged} damaged; {scrub['passes']} passes"
        f"{finished}; {scrub['progress']:.0%} of this one"
    )


def _nvme_rows(counts: Table, tier: Mapping[str, Any]) -> None:
    durable, room = format_size(tier["durable_bytes"]), format_size(tier["durable_capacity_bytes"])
    counts.add_row("durable", f"{durable} of {room}")
    written, behind = format_size(tier["appended_bytes"]), tier["write_behind"] + tier["backlog"]
    counts.add_row(
        "to NVMe", f"{written}, {tier['write_amplification']:.2f} times what was asked; {behind} objects wait"
    )
    if tier["trouble"]:
        counts.add_row("trouble", tier["trouble"])
    if tier["away_since_ns"] is not None:
        counts.add_row("drive", f"away, without an answer since {time_text(tier['away_since_ns'])}")


def _cold_rows(counts: Table, tier: Mapping[str, Any]) -> None:
    sent, fetched = format_size(tier["uploaded_bytes"]), format_size(tier["fetched_bytes"])
    waiting = tier["queued"] + tier["leaving"]
    counts.add_row("to and from cold", f"{sent} sent, {fetched} read back; {waiting} objects wait")
    if not tier["is_up"]:
        counts.add_row("cold trouble", tier["trouble"])

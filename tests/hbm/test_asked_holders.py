"""Who is on a device, asked of a stand-in for NVML: what is listed, what is refused, and that nobody waits for it."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs import limits
from kvfs.errors import DeviceFailed, DeviceMissing, LimitExceeded
from tests.support.cuda_standin import DEVICE
from tests.support.device_pools import Clock
from tests.support.nvml_standin import LISTS, NvmlStandin, build_nvml
from tests.support.waits import eventually
from tiers.hbm.driver_ports import Listing
from tiers.hbm.holders.asked_holders import AskedHolders, is_here
from tiers.hbm.holders.nvml import Nvml

OTHER = DEVICE[:-1] + "1"
HERE = os.getpid()
NOBODY = (1 << 22) + 1
"""Above the largest pid that Linux gives (PID_MAX_LIMIT)."""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlStandin:
    standin = NvmlStandin(library, tmp_path / "nvml")
    for name, value in standin.environment.items():
        monkeypatch.setenv(name, value)
    return standin


class Asked:
    """What is known of the holders, where questions are answered when the test says so."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.held: list[Callable[[], None]] = []
        self.answered = 0
        self._nvml = Nvml()
        self.holders = AskedHolders(self._processes, clock=self.clock, start=self.held.append)

    def _processes(self, device: str) -> frozenset[int]:
        self.answered += 1
        return self._nvml(device)

    def ask(self, device: str = DEVICE) -> Listing | None:
        """Ask, have it answered if it is a question, and return what is known then."""
        self.holders.ask(device)
        self.answer()
        return self.holders.listing(device)

    def answer(self) -> None:
        while self.held:
            self.held.pop()()

    def ask_later(self, passed_s: float, device: str = DEVICE) -> Listing | None:
        self.clock.now_s += passed_s
        return self.ask(device)

    @property
    def why(self) -> str:
        """What is said to be missing."""
        return " / ".join(self.holders.missing())


# --- the library ------------------------------------------------------------------------------------------
def test_who_is_on_a_device_is_listed(nvml: NvmlStandin) -> None:
    assert Nvml()(DEVICE) == frozenset()
    nvml.say(7, 8, 7)
    assert Nvml()(DEVICE) == {7, 8}
    assert Nvml()(OTHER) == frozenset()


def test_who_shares_a_context_is_left_out(nvml: NvmlStandin) -> None:
    """The daemon of MPS has it, and may still end it when its client has gone."""
    nvml.say(7, 8, shared=[8, 9])
    assert Nvml()(DEVICE) == {7}


def test_a_long_list_is_whole(nvml: NvmlStandin) -> None:
    nvml.say(*range(limits.HBM_LISTED))
    assert Nvml()(DEVICE) == set(range(limits.HBM_LISTED))


def test_a_list_that_the_driver_may_have_cut_is_none(nvml: NvmlStandin) -> None:
    nvml.say(*range(limits.HBM_LISTED + 1))
    with pytest.raises(LimitExceeded, match=f"{limits.HBM_LISTED + 1} processes, {limits.HBM_LISTED} are"):
        Nvml()(DEVICE)


@pytest.mark.parametrize(
    ("function", "result", "text"),
    [
        ("nvmlInit_v2", 9, "nvmlInit_v2: Unknown Error (9)"),
        ("nvmlDeviceGetHandleByUUID", 4, "nvmlDeviceGetHandleByUUID: Insufficient Permissions (4)"),
        (LISTS, 3, f"{LISTS}: Not Supported (3)"),
        (LISTS.replace("Get", "GetMPS"), 3, "nvmlDeviceGetMPSComputeRunningProcesses_v3: Not Supported (3)"),
        (LISTS, 15, f"{LISTS}: GPU is lost (15)"),
    ],
)
def test_what_is_refused_names_the_call_and_goes_on_once_it_is_not(
    function: str, result: int, text: str, nvml: NvmlStandin
) -> None:
    asked, before = Nvml(), nvml.initialised
    nvml.say(HERE)
    assert asked(DEVICE) == {HERE}
    nvml.say(results={LISTS: 3, "nvmlShutdown": 999})
    with pytest.raises(DeviceFailed, match="Not Supported"):
        asked(DEVICE)
    nvml.say(HERE, results={function: result})
    with pytest.raises(DeviceFailed, match=re.escape(text)):
        asked(DEVICE)
    assert nvml.initialised == before
    nvml.say(HERE)
    assert asked(DEVICE) == {HERE}
    assert nvml.initialised == before + 1


def test_a_device_that_nvml_does_not_know_is_said(nvml: NvmlStandin) -> None:
    with pytest.raises(DeviceFailed, match="nvmlDeviceGetHandleByUUID: Not Found"):
        Nvml()("GPU-other")


def test_a_library_that_is_not_there_or_another_is_named() -> None:
    with pytest.raises(DeviceMissing, match="/none/nvml: cannot open"):
        Nvml("/none/nvml")(DEVICE)
    with pytest.raises(DeviceMissing, match=r"libc\.so\.6 has no nvmlInit_v2"):
        Nvml("libc.so.6")(DEVICE)


# --- the questions ----------------------------------------------------------------------------------------
def test_nobody_waits_for_an_answer(nvml: NvmlStandin) -> None:
    asked = Asked()
    nvml.say(HERE)
    asked.holders.ask(DEVICE)
    asked.holders.ask(DEVICE)
    assert asked.holders.listing(DEVICE) is None
    assert len(asked.held) == 1
    asked.answer()
    listing = asked.holders.listing(DEVICE)
    assert listing is not None
    assert listing.pids == {HERE}
    assert listing.is_ours
    assert asked.answered == 1
    assert asked.holders.missing() == []


def test_a_driver_that_does_not_answer_holds_one_thread_and_nobody(nvml: NvmlStandin, tmp_path: Path) -> None:
    door, clock = tmp_path / "door", Clock()
    os.mkfifo(door)
    nvml.say(HERE, wait=door)
    holders = AskedHolders(Nvml(), clock=clock)
    holders.ask(DEVICE)
    with door.open("w"):  # opens once the listing waits there, in a thread of its own
        nvml.say(HERE)
        assert holders.listing(DEVICE) is None
        clock.now_s += limits.HBM_LISTING_AGE_S + 1
        holders.ask(OTHER)
        [silent] = holders.missing()
        assert f"device {OTHER} is not known" in silent
        assert "NVML has not answered for 5 s" in silent
    eventually(lambda: holders.listing(OTHER) is not None, "the thread goes on")
    assert holders.listing(DEVICE) is None, "an answer that took too long says nothing"
    assert holders.missing() == []
    holders.ask(DEVICE)
    eventually(lambda: holders.listing(DEVICE) is not None, "there is another question")


def test_a_listing_says_nothing_once_it_is_old(nvml: NvmlStandin) -> None:
    asked = Asked()
    first = asked.ask()
    assert first is not None
    nvml.say(HERE)
    assert asked.ask_later(limits.HBM_LISTING_PAUSE_S / 2) == first, "it is not asked that often"
    second = asked.ask_later(limits.HBM_LISTING_PAUSE_S)
    assert second is not None
    assert second.pids == {HERE}
    assert second.asked_s > first.asked_s
    asked.clock.now_s += limits.HBM_LISTING_AGE_S
    assert asked.holders.listing(DEVICE) is None


def test_each_device_has_its_own(nvml: NvmlStandin) -> None:
    asked = Asked()
    nvml.say(HERE, device=OTHER)
    asked.holders.ask(DEVICE)
    asked.holders.ask(OTHER)
    asked.answer()
    found = [asked.holders.listing(device) for device in (DEVICE, OTHER)]
    assert [each and each.pids for each in found] == [frozenset(), {HERE}]


def test_what_is_in_the_way_is_said_once_in_the_log_and_shown_while_it_is(
    nvml: NvmlStandin, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Asked()
    with caplog.at_level(logging.WARNING, "kvfs.hbm"):
        nvml.say(results={LISTS: 4})
        assert asked.ask() is None
        nvml.say(HERE)
        assert asked.ask_later(limits.HBM_LISTING_RETRY_S / 2) is None, "it is not asked again so soon"
        assert f"device {DEVICE} is not known" in asked.why
        assert "waits 10 s: " in asked.why
        assert "Insufficient Permissions" in asked.why
        assert asked.ask_later(limits.HBM_LISTING_RETRY_S) is not None
        assert asked.why == ""
        nvml.say(results={LISTS: 15})
        assert asked.ask_later(limits.HBM_LISTING_AGE_S + 1) is None
        assert "GPU is lost" in asked.why
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "Insufficient Permissions (4)"
    ]


def test_a_thread_that_cannot_start_is_said(nvml: NvmlStandin) -> None:
    def no_thread(_: object) -> None:
        raise RuntimeError("can't start new thread")

    holders = AskedHolders(Nvml(), start=no_thread)
    holders.ask(DEVICE)
    assert "can't start new thread" in holders.missing()[0]
    holders.ask(DEVICE)


@pytest.mark.parametrize("stranger", [0, NOBODY, (1 << 32) - 1])
def test_a_pid_of_nobody_here_is_noticed(stranger: int, nvml: NvmlStandin) -> None:
    asked = Asked()
    nvml.say(HERE, stranger)
    listing = asked.ask()
    assert listing is not None
    assert listing.pids == {HERE, stranger}
    assert not listing.is_ours
    assert asked.why == "", "it may have been killed just now"
    asked.ask_later(1)
    assert f"NVML lists process {stranger}, which is none that this service sees" in asked.why
    nvml.say(HERE)
    listing = asked.ask_later(1)
    assert listing is not None
    assert listing.is_ours
    assert asked.why == ""


def test_processes_of_others_are_here_and_those_that_ended_are_not() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert [is_here(pid) for pid in (1, HERE, process.pid)] == [True, True, False]

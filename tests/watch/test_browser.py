"""The page in a browser: what a real Conductor and a real store show of real traffic, also after they restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from bench.conductor_http import idle_engine
from tests.scheduler.conductor.test_command import TOKEN, running, settings
from tests.support.conductors import instance
from tests.support.gateway import Gateway, gateway, until
from tests.support.waits import WAIT_S
from tests.support.watching import page_url

CHROMIUM: Final = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None
)
HOSTILE: Final = "<script>document.title='taken'</script>"
MODEL: Final = "<img src=x onerror=alert(1)>"
WAIT_MS: Final = 20_000
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: packaging/system packages test installs it where there is a package")
    with sync_playwright() as playwright:
        # Root has no sandbox, and /dev/shm belongs to the stores under test.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        with playwright.chromium.launch(executable_path=CHROMIUM, args=arguments) as browser:
            yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which nothing goes wrong: no error of a script, nothing that its policy forbids, no alert."""
    wrong: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("console", lambda said: wrong.append(said.text) if _is_wrong(said.type, said.text) else None)
        yield page
    assert wrong == []


def _is_wrong(kind: str, text: str) -> bool:
    """What the browser itself says of a server that is gone, or refuses, is no error of the page."""
    return kind in ("error", "warning") and not text.startswith("Failed to load resource")


class Asker:
    """Sends requests to a Conductor."""

    def __init__(self, url: str, token: str = TOKEN) -> None:
        self._url, self._token = url, token

    def ask(self, path: str, value: object = None) -> Any:
        headers = {"Authorization": f"Bearer {self._token}"}
        request = Request(self._url + path, json.dumps(value or {}).encode(), headers, method="POST")
        try:
            with urlopen(request, timeout=WAIT_S) as answer:
                return json.loads(answer.read() or b"null")
        except HTTPError as error:
            with error:
                return json.loads(error.read())

    def traffic(self, count: int) -> list[str]:
        """Route requests and end them; return their ids."""
        ids = []
        for n in range(count):
            ids.append(self.ask("/v1/route", {"model": MODEL, "tokens": [n] * 40})["id"])
            self.ask(f"/v1/reservations/{ids[-1]}/first_token")
            self.ask(f"/v1/reservations/{ids[-1]}/done", {"cached_tokens": 0, "output_tokens": 4})
        return ids


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with idle_engine() as url:
        yield url


def configured(where: Path, engine: str) -> Path:
    """Write the configuration of a Conductor with two instances, one of a hostile name."""
    file = where / "instances.json"
    names = (HOSTILE, "calm")
    topics = ("topic-a", "topic-b")
    file.write_bytes(
        msgspec.json.encode(
            [
                instance(name, url=engine, model=MODEL, engine_topic=topic)
                for name, topic in zip(names, topics, strict=True)
            ]
        )
    )
    return settings(where, instances=str(file), tokens=[TOKEN])


def give_token(page: Page, token: str = TOKEN) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Show").click()


def decisions(page: Page) -> Any:
    return page.get_by_role("region", name="Decisions, table").locator("tbody tr")


def instances_registered(url: str) -> bool:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with urlopen(Request(f"{url}/v1/instances", headers=headers), timeout=WAIT_S) as answer:
        return len(json.loads(answer.read())["instances"]) == 2


def test_a_conductor_from_the_token_to_the_reason_of_a_decision(
    page: Page, tmp_path: Path, engine: str
) -> None:
    with running(configured(tmp_path, engine)) as (_, url):
        asker = Asker(url)
        while not instances_registered(url):
            pass
        before = asker.traffic(3)
        page.goto(url)
        expect(page.get_by_text("a token is needed")).to_be_visible()
        give_token(page, "not the token of this service")
        expect(page.get_by_text("a token is needed")).to_be_visible()
        give_token(page)
        table = page.get_by_role("region", name="Instances, table")
        expect(table.get_by_role("cell", name=HOSTILE, exact=True)).to_be_visible()
        expect(page).to_have_title("kvfs: Conductor")
        expect(decisions(page)).to_have_count(3)
        after = asker.traffic(4)
        expect(decisions(page)).to_have_count(7)
        assert {row.split()[0] for row in decisions(page).all_inner_texts()} == {*before, *after}
        expect(decisions(page).first).to_contain_text("done")
        expect(page.locator("#problems")).to_contain_text("topic-a: nothing was heard of it")

        refused = asker.ask("/v1/route", {"model": MODEL, "tokens": [1] * 4_000, "ttft_slo_s": 1e-6})
        assert refused["reason"]
        expect(page.get_by_role("region", name="Refusals, table")).to_contain_text(refused["reason"])
        page.get_by_label("Outcome").select_option(f"refused: {refused['reason']}")
        expect(decisions(page)).to_have_count(1)
        page.get_by_label("Outcome").select_option("")
        page.get_by_label("Contains").fill(before[1])
        expect(decisions(page)).to_have_count(1)

        page.get_by_role("button", name=f"why decision {before[1]}").click()
        why = page.get_by_role("dialog")
        expect(why).to_contain_text("prefills: 0 of 40 tokens are reused")
        expect(why.get_by_role("region", name="prefill, table")).to_contain_text(HOSTILE)
        why.get_by_role("button", name="Close").click()
        expect(why).to_be_hidden()
        assert page.locator("script").count() == 1
        assert page.locator("img").count() == 0


def test_decisions_are_sorted_by_any_column(page: Page, tmp_path: Path, engine: str) -> None:
    with running(configured(tmp_path, engine)) as (_, url):
        while not instances_registered(url):
            pass
        asker = Asker(url)
        for count in (30, 500, 70, 200):
            asker.ask("/v1/route", {"model": MODEL, "tokens": [1] * count})
        page.goto(url)
        give_token(page)
        expect(decisions(page)).to_have_count(4)
        page.get_by_label("hold still").check()
        region = page.get_by_role("region", name="Decisions, table")
        head = region.get_by_role("columnheader", name="tokens", exact=True)
        for direction, wanted in (("ascending", [30, 70, 200, 500]), ("descending", [500, 200, 70, 30])):
            head.get_by_role("button").click()
            expect(head).to_have_attribute("aria-sort", direction)
            shown = [int(row.split("\t")[3]) for row in decisions(page).all_inner_texts()]
            assert shown == wanted
        # Unknown values come last, whichever way.
        asker.ask(f"/v1/reservations/{region.locator('tbody button').first.inner_text()}/first_token")
        page.get_by_label("hold still").uncheck()
        ttft = region.get_by_role("columnheader", name="TTFT", exact=True)
        for _ in range(2):
            ttft.get_by_role("button").click()
            expect(decisions(page).first).to_contain_text("answering")


def test_it_connects_again_to_a_conductor_that_was_killed_and_started_anew(
    page: Page, tmp_path: Path, engine: str
) -> None:
    with running(configured(tmp_path, engine)) as (process, url):
        while not instances_registered(url):
            pass
        Asker(url).traffic(2)
        page.goto(url)
        give_token(page)
        expect(decisions(page)).to_have_count(2)
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
        expect(page.locator("#state")).to_have_text("connection lost, trying again")
    port = url.rpartition(":")[2]
    again = configured(tmp_path, engine)
    again.write_text(again.read_text().replace("127.0.0.1:0", f"127.0.0.1:{port}"))
    with running(again) as (process, url):
        expect(page.locator("#state")).to_have_text("connected")
        expect(decisions(page)).to_have_count(0)
        [id] = Asker(url).traffic(1)
        expect(decisions(page)).to_have_count(1)
        expect(decisions(page)).to_contain_text(id)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0, "the stream that is open keeps it from nothing"


@pytest.fixture(scope="module")
def store() -> Iterator[Gateway]:
    with gateway(mode="off", nvme="64MiB", settings='admin = "127.0.0.1:0"') as door:
        yield door


def test_a_store_and_what_is_done_with_it(page: Page, store: Gateway) -> None:
    page.goto(page_url(store))
    expect(page.get_by_role("heading", level=1)).to_have_text(str(store.service.data))
    tiers = page.get_by_role("region", name="Tiers, table")
    expect(tiers.locator("tbody tr")).to_have_count(2)
    expect(tiers).to_contain_text("256 MiB")
    s3 = store.client()
    s3.create_bucket(Bucket="shown")
    for n in range(5):
        s3.put_object(Bucket="shown", Key=f"k{n}", Body=bytes(100_000))
    doors = page.get_by_role("region", name="Doors, table")
    row = doors.get_by_role("row").filter(has_text="PutObject")
    expect(row.get_by_role("cell").nth(3)).to_have_text("5")
    objects = page.locator("dl div").filter(has_text="Objects").locator("dd")
    expect(objects.first).to_have_text("5")
    expect(page.locator("#decisions")).to_be_hidden()


def test_it_connects_again_to_a_gateway_process_that_was_killed(page: Page, store: Gateway) -> None:
    page.goto(page_url(store))
    state = page.locator("#state")
    expect(state).to_have_text("connected")
    [pid] = store.worker_pids()
    os.kill(pid, signal.SIGKILL)
    expect(state).to_have_text("connection lost, trying again")
    expect(state).to_have_text("connected")
    until(lambda: bool(store.worker_pids()), store)


@pytest.mark.parametrize("width", [320, 390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read(page: Page, store: Gateway, width: int, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(page_url(store))
    expect(page.get_by_role("region", name="Tiers, table")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ratios = page.evaluate(CONTRASTS)
    assert min(ratios.values()) >= 4.5, ratios
    assert page.evaluate("document.querySelectorAll('th:not([scope])').length") == 0
    assert page.evaluate(
        "[...document.querySelectorAll('section')].every((one) => one.ariaLabelledByElements"
        " ? one.ariaLabelledByElements.length : one.getAttribute('aria-labelledby'))"
    )


CONTRASTS: Final = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(name).trim().slice(1);
    const [r, g, b] = [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
      .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [more, less] = [light(one), light(other)].sort((a, b) => b - a);
    return (more + 0.05) / (less + 0.05);
  };
  const found = {};
  for (const ground of ["--ground", "--sheet"])
    for (const ink of ["--ink", "--soft", "--accent"]) found[ink + ground] = ratio(ink, ground);
  found.alarm = ratio("--alarm", "--alarm-ground");
  return found;
}"""
"""Contrast of each colour of text with each ground, as WCAG reckons it."""

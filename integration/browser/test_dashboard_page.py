"""The dashboard in a real browser: it shows the job as it is, follows it, and acts only where it may."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from pearl_rl.live.server import Dashboard
from pearl_rl.live.testing import OperableJob
from pearl_rl.observer import StepRecord
from pearl_state.events import GpusReclaimed, RolloutProgressed
from pearl_state.worker import GpuId

pytestmark = pytest.mark.browser
TOKEN = "a-token-for-tests"


class Shown:
    """A job and its dashboards, read-only and with control, in a loop of their own."""

    def __init__(self, path):
        self._path, self._ready, self._thread = path, threading.Event(), ThreadPoolExecutor(1)

    def __enter__(self):
        self._future = self._thread.submit(asyncio.run, self._main())
        assert self._ready.wait(60) or self._future.result()
        return self

    async def _main(self):
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        reading, acting = Dashboard(self._path_made(), token=None), None
        async with self.job:
            acting = Dashboard(self._path, token=TOKEN)
            self.reading, self.acting = await reading.start() + "/", f"{await acting.start()}/#token={TOKEN}"
            self._ready.set()
            await self._ending.wait()
            await reading.aclose()
            await acting.aclose()

    def _path_made(self):
        self.job = OperableJob(self._path)
        return self._path

    def do(self, act):
        """Run `act` in the job's loop and wait for it."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (act(self.job), done.set()))
        assert done.wait(10)

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._ending.set)
        self._future.result(60)
        self._thread.shutdown()


@pytest.fixture
def shown(tmp_path):
    with Shown(tmp_path / "run") as job:
        yield job


def tile(page, key):
    return page.locator(f'.tiles [data-key="{key}"] dd').inner_text()


def eventually(page, check):
    """Waits until `check` holds; the page's policy forbids it to wait for scripts of ours."""
    for _ in range(200):
        if check():
            return
        page.wait_for_timeout(50)
    assert check()


def wait_for(page, key, text):
    eventually(page, lambda: text in tile(page, key))


def text_of(page, selector):
    return page.locator(selector).inner_text()


def test_the_map_is_the_table(visit, shown):
    page = visit(shown.reading).page
    page.wait_for_selector(".cell")
    rows = shown.job.state.table.rows
    for id_, row in rows.items():
        cell = page.locator(f'.cell[data-id="{id_}"]')
        assert cell.get_attribute("data-lifecycle") == row.lifecycle
        assert (
            cell.locator("b").inner_text()
            == {"prefill": "P", "decode": "D", "colocated": "C", "training": "T"}[row.role]
        )
    assert page.locator(".cell").count() == len(rows)
    assert tile(page, "configuration") == str(shown.job.state.table.configuration)
    active = len(shown.job.state.table.active())
    assert tile(page, "queue") == f"{3 * active} + {active}"
    assert tile(page, "serving") == str(active)


def test_it_follows_the_job(visit, shown):
    page = visit(shown.reading).page
    page.wait_for_selector(".cell")
    shown.do(lambda job: job.post(RolloutProgressed(now_s=3.0, step=1, remaining=16)))
    eventually(page, lambda: page.locator(".bar").get_attribute("aria-valuenow") == "75")
    assert "48 of 64 trajectories complete" in page.locator(".batchwords").inner_text()
    record = StepRecord(
        step=1,
        steps=60,
        now_s=9.0,
        reward_mean=0.625,
        duration_s=2.0,
        generated_tokens=500,
        trained_tokens=500,
        rollout_s=1.5,
    )
    shown.do(lambda job: job.record_step(record))
    wait_for(page, "step", "1/60")
    assert (tile(page, "throughput"), tile(page, "reward")) == ("500", "0.625")
    assert page.locator(".spark figcaption").all_inner_texts() == [
        "tokens/s (now 500)",
        "makespan (now 1.5 s, predicted none)",
        "reward (now 0.625)",
    ]
    scales = ["0", "500", "step 1", "0 s", "1.5 s", "step 1", "0.63", "step 1"]
    assert page.locator(".spark text.axis").all_text_contents() == scales
    lost = GpusReclaimed(now_s=10.0, gpus=frozenset({GpuId(5)}), deadline_s=12.0)
    shown.do(lambda job: job.post(lost))
    wait_for(page, "reclaims", "1")
    assert page.locator(".cell").count() == len(shown.job.state.table.rows)
    assert "GPU 5 reclaimed, 2.0 s notice" in page.locator(".news li").first.inner_text()


def test_long_durations_at_an_axis_are_not_cut(visit, shown):
    page = visit(shown.reading).page
    for number in (1, 2):
        record = StepRecord(
            step=number, steps=60, now_s=900.0 * number, duration_s=900.0, rollout_s=883.0 * number, reward_mean=0.5
        )
        shown.do(lambda job, record=record: job.record_step(record))
    wait_for(page, "step", "2/60")
    labels = page.locator(".spark text.axis").all()
    assert "29 min 26 s" in [label.text_content() for label in labels]
    for label in labels:
        drawn, frame = label.bounding_box(), label.locator("xpath=..").bounding_box()
        assert drawn["x"] >= frame["x"] - 0.5


def test_a_damaged_file_is_named_until_it_is_mended(visit, shown):
    page = visit(shown.reading).page
    page.wait_for_selector(".cell")
    table = shown.job.folder.path / "table.jsonl"
    whole = table.read_text()
    table.write_text(whole + "[1]\n")
    eventually(page, lambda: "table.jsonl: line" in text_of(page, ".state"))
    table.write_text(whole)
    eventually(page, lambda: text_of(page, ".state") == "running")


def test_decisions_are_those_of_the_job_newest_first(visit, shown):
    page = visit(shown.reading).page
    page.wait_for_selector(".decided .decision")
    last = shown.job.state.last_decision
    first = page.locator(".decided .decision:has(.why:not(:has-text('benefit'))):not(:has-text('training GPUs'))").first
    assert str(last.selected) in first.locator("summary").inner_text()
    first.locator("summary").click()
    names = [row.inner_text() for row in first.locator("tbody td:first-child").all()]
    assert names == [str(candidate.configuration) for candidate in last.candidates[:6]]


def test_decisions_that_changed_nothing_can_be_left_out(visit, shown):
    page = visit(shown.reading).page
    page.wait_for_selector(".decided .decision")
    kinds = [item.get_attribute("data-kind") for item in page.locator(".decided .decision").all()]
    page.get_by_role("button", name="changes only").click()
    assert page.locator(".decided .decision:visible").count() == len(kinds) - kinds.count("stay") > 0
    page.get_by_role("button", name="all", exact=True).click()
    assert page.locator(".decided .decision:visible").count() == len(kinds)


def test_reading_is_all_that_anybody_may_do_by_default(visit, shown):
    visited = visit(shown.reading)
    page = visited.page
    page.wait_for_selector(".cell")
    assert "Read-only" in page.locator(".hint").inner_text()
    assert page.locator("form.controls button:enabled").count() == 0
    assert page.locator(".cell button").count() == 0
    assert page.evaluate("fetch('/commands', {method: 'POST', body: '{\"unpin\": true}'}).then((r) => r.status)") == 403
    assert all("403" in visited.errors.pop() for _ in list(visited.errors))


def test_controls_reach_the_job_from_the_keyboard(visit, shown):
    page = visit(shown.acting).page
    page.wait_for_selector(".controls button:enabled")
    page.locator(".pin").focus()
    page.keyboard.type("2p2d")
    page.keyboard.press("Enter")
    wait_for(page, "configuration", " pinned")
    assert str(shown.job.state.pinned) == "2P2D"
    assert tile(page, "configuration") == f"{shown.job.state.table.configuration} pinned"
    assert page.locator(".hint").inner_text() == "Pinned to 2P2D."
    assert page.locator(".answer").inner_text() == "pinned: 2P2D"
    page.get_by_role("button", name="unpin").focus()
    page.keyboard.press("Space")
    eventually(page, lambda: text_of(page, ".hint") == "The policy chooses.")
    assert shown.job.state.pinned is None
    page.get_by_role("button", name="freeze").click()
    eventually(page, lambda: text_of(page, ".hint").startswith("Pinned to"))
    now = str(shown.job.state.table.configuration)
    assert str(shown.job.state.pinned) == now


def test_workers_are_fenced_off_and_put_back(visit, shown):
    page = visit(shown.acting).page
    page.get_by_role("button", name="cordon worker 6", exact=True).click()
    page.get_by_role("button", name="uncordon worker 6").wait_for()
    assert shown.job.state.table.rows[6].cordoned
    assert 6 not in shown.job.state.table.active()
    page.get_by_role("button", name="uncordon worker 6").click()
    page.get_by_role("button", name="cordon worker 6", exact=True).wait_for()
    assert 6 in shown.job.state.table.active()


def test_a_refusal_is_told(visit, shown):
    visited = visit(shown.acting)
    page = visited.page
    page.wait_for_selector(".controls button:enabled")
    page.evaluate("document.querySelector('.pin').removeAttribute('pattern')")
    page.locator(".pin").fill("lots")
    errors = page.evaluate("document.querySelector('form').requestSubmit()")
    assert errors is None
    eventually(page, lambda: "not like" in text_of(page, ".answer"))
    assert shown.job.state.pinned is None
    eventually(page, lambda: visited.errors)
    assert all("409" in visited.errors.pop() for _ in list(visited.errors))


def test_no_request_leaves_the_machine(visit, shown):
    visited = visit(shown.reading)
    visited.page.wait_for_selector(".cell")
    hosts = {urlsplit(url).hostname for url in visited.requests if not url.startswith("data:")}
    assert hosts == {"127.0.0.1"}


@pytest.mark.parametrize("size", ["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_widths_and_themes_are_usable(visit, shown, size, scheme, screenshot, check_readable):
    for number in range(1, 9):
        record = StepRecord(
            step=number,
            steps=60,
            now_s=3.0 * number,
            reward_mean=0.3 + 0.02 * number,
            duration_s=2.0,
            generated_tokens=500 + 40 * number,
            trained_tokens=500,
            rollout_s=1.5 + 0.1 * (number % 3),
            predicted_rollout_s=1.6,
        )
        shown.do(lambda job, record=record: job.record_step(record))
    page = visit(shown.acting, size, scheme).page
    page.wait_for_selector(".cell button")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    check_readable(page, ["h1", ".tiles dd", ".tiles dt", ".hint", ".cell small", ".decision .why", ".news li"])
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    screenshot(page, f"dashboard-{size}-{scheme}")
    for _ in range(2 if scheme == "dark" else 1):
        page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before

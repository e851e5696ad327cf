"""The report in a real browser: its values are the run's, its controls work, and it asks nobody for anything."""

import json

import pytest

from pearl_rl.report.page import comparison_page, run_page
from pearl_rl.report.run_record import read_run
from pearl_rl.run_folder import read_decisions, read_lines

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror='window.broken=1'><script>window.broken=1</script>"


@pytest.fixture(scope="module")
def url(run_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(run_page(read_run(run_folder)), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(visit, url):
    return visit(url, offline=True).page


def tile(page, key):
    return page.locator(f'.tiles [data-key="{key}"] dd').inner_text()


def test_tiles_are_the_runs_own_figures(page, run_folder):
    steps = list(read_lines(run_folder / "metrics.jsonl"))
    tokens = sum(step["generated_tokens"] + step["trained_tokens"] for step in steps)
    rate = tokens / sum(step["duration_s"] for step in steps)
    assert float(tile(page, "throughput").replace(",", "")) == pytest.approx(rate, abs=0.5)
    assert int(tile(page, "steps")) == len(steps)
    events = [line["event"] for line in read_lines(run_folder / "events.jsonl")]
    assert int(tile(page, "reclaims")) == events.count("GpusReclaimed") > 0
    counts = json.loads((run_folder / "summary.json").read_text())["counts"]
    for key in ("borrows", "expansions", "mode_switches", "ratio_switches"):
        assert int(tile(page, key)) == counts[key]
    assert tile(page, "lost") == tile(page, "stale") == "0"


def test_decisions_are_those_of_the_file_with_what_lost(page, run_folder):
    recorded = [line for line in read_decisions(run_folder / "decisions.jsonl") if line["gate"] is None]
    shown = page.locator(".decision")
    assert shown.count() == len(recorded) > 3
    for index in (0, len(recorded) // 2, len(recorded) - 1):
        decision = recorded[index]["decision"]
        item = shown.nth(index)
        assert decision["selected"] in item.locator("summary b").inner_text()
        item.locator("summary").click()
        rows = item.locator("tbody tr")
        first = [rows.nth(row).locator("td").first.inner_text() for row in range(rows.count())]
        assert first == [candidate["configuration"] for candidate in decision["candidates"]]
        assert item.locator("tr.chosen td").first.inner_text() == decision["selected"]


def test_arrow_keys_read_out_the_steps(page, run_folder):
    steps = list(read_lines(run_folder / "metrics.jsonl"))
    page.locator('[data-chart="throughput"] .draw').focus()
    readout = page.locator(".readout")
    assert readout.is_hidden()
    for key, step in (("ArrowRight", steps[0]), ("ArrowRight", steps[1]), ("End", steps[-1]), ("ArrowLeft", steps[-2])):
        page.keyboard.press(key)
        text = readout.inner_text()
        rate = (step["generated_tokens"] + step["trained_tokens"]) / step["duration_s"]
        assert f"step {step['step']}" in text
        assert f"{rate:.0f}" in text
        assert step["configuration"] in text
    assert page.locator("svg.wide .cursor").count() == 2
    page.keyboard.press("Escape")
    assert readout.is_hidden()
    assert page.locator(".cursor").count() == 0


def test_the_pointer_reads_out_the_step_under_it(page, run_folder):
    steps = list(read_lines(run_folder / "metrics.jsonl"))
    plot = page.locator('[data-chart="workers"] svg.wide')
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 20)
    assert page.locator(".readout").get_attribute("data-step") == str(steps[-1]["step"])


def test_decisions_can_be_filtered_and_found(page, run_folder):
    recorded = [line["decision"] for line in read_decisions(run_folder / "decisions.jsonl") if line["gate"] is None]
    switches = [d for d in recorded if d["previous"] is not None and d["previous"] != d["selected"]]
    visible = page.locator(".decision:visible")
    page.get_by_role("button", name="changes only").click()
    assert visible.count() == len(switches) > 0
    assert page.get_by_role("button", name="changes only").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="all", exact=True).click()
    page.get_by_placeholder("2P3D").fill("TrainingFinished")
    triggers = [line["trigger"] for line in read_decisions(run_folder / "decisions.jsonl") if line["gate"] is None]
    assert visible.count() == triggers.count("TrainingFinished")
    assert page.locator(".count").inner_text() == f"{visible.count()} of {len(recorded)}"


def test_everything_works_from_the_keyboard(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "theme"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "draw"
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.parentElement === document.querySelector('.decision')")
    page.keyboard.press("Enter")
    assert page.locator(".decision").first.get_attribute("open") is not None
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_are_readable(visit, url, scheme, check_readable):
    page = visit(url, scheme=scheme).page
    check_readable(page, ["h1", "header p", ".tiles dd", ".tiles dt", ".findings li", ".legend li", ".decision .why"])
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    page.keyboard.press("t" if scheme == "dark" else "Shift")
    other = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert other != background
    check_readable(page, ["h1", "header p", ".tiles dd", ".findings li", ".decision .why"])


@pytest.mark.parametrize("size", ["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_at_either_width(visit, url, size, scheme, screenshot):
    page = visit(url, size, scheme).page
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    other = "narrow" if size == "wide" else "wide"
    assert page.locator(f"svg.{size}:visible").count() == page.locator(f"svg.{size}").count() > 5
    assert page.locator(f"svg.{other}:visible").count() == 0
    page.locator(".decision summary").first.click()
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    cut = page.evaluate(
        """(size) => [...document.querySelectorAll(`svg.${size} text`)].filter((text) => {
          const box = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
          return box.left < outer.left - 1 || box.right > outer.right + 1;
        }).map((text) => text.textContent)""",
        size,
    )
    assert cut == []
    screenshot(page, f"report-{size}-{scheme}")


def test_no_request_leaves_the_page(visit, url):
    visited = visit(url)
    visited.page.wait_for_load_state("networkidle")
    assert [request for request in visited.requests if not request.startswith("data:")] == [url]


def test_hostile_strings_stay_text(visit, run_folder, tmp_path):
    for path in run_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    scenario = json.loads((run_folder / "scenario.json").read_text())
    scenario["name"] = scenario["gpu"] = HOSTILE
    (tmp_path / "scenario.json").write_text(json.dumps(scenario))
    target = tmp_path / "hostile.html"
    target.write_text(run_page(read_run(tmp_path)), encoding="utf-8")
    page = visit(target.as_uri()).page
    assert page.evaluate("window.broken") is None
    assert HOSTILE in page.locator("h1").inner_text()


def test_runs_are_compared_side_by_side(visit, run_folder, tmp_path, screenshot):
    run = read_run(run_folder)
    target = tmp_path / "compared.html"
    target.write_text(comparison_page([run, run], "two alike"), encoding="utf-8")
    page = visit(target.as_uri(), "narrow").page
    assert page.locator('[data-table="comparison"] tbody tr').count() == 2
    page.locator("details.one summary").first.click()
    assert page.locator("details.one .tiles").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    screenshot(page, "comparison-narrow")
    page.locator("details.one summary").first.click()
    page.locator("details.one").last.locator("summary").first.click()
    page.locator("h1").first.click()
    for _ in range(2):
        page.keyboard.press("j")
    # The keys walk through the decisions of the run that is open, not of the folded one before it.
    walked = page.locator("details.one").last.locator(".decision > summary").nth(1)
    assert walked.evaluate("(item) => item === document.activeElement")

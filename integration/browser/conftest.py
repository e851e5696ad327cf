"""A headless Chromium, small simulated runs to look at, and a watch over every request that a page makes."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from pearl_rl.run_folder import RunFolder
from pearl_rl.simulation.cluster import simulate
from pearl_rl.simulation.scenario import load_scenario

# `nox -s browser` brings Playwright; elsewhere there is nothing to collect here.
collect_ignore_glob = [] if find_spec("playwright") else ["test_*.py"]
SIZES = {"wide": (1280, 900), "narrow": (390, 844)}


def record(path: Path, name: str, *values: str) -> Path:
    """Simulate a scenario into a run folder."""
    scenario = load_scenario(name, values)
    # In a thread of its own: Playwright keeps a loop running in this one.
    with RunFolder.create_simulation(scenario.model_dump(), path) as folder, ThreadPoolExecutor(1) as thread:
        folder.write_summary(thread.submit(simulate, scenario, folder=folder).result().to_json(full=False))
    return path


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """Six steps of the paper's cluster with small batches: reclaims, borrows and switches all happen."""
    values = ("rollout.batch=32", "rollout.group_size=4", "run.steps=6", "workload.max_turns=6")
    return record(tmp_path_factory.mktemp("run") / "run", "paper-segment1", "availability.time_scale=20.0", *values)


@pytest.fixture(scope="session")
def chromium():
    """Debian's Chromium, or the one that PEARL_CHROMIUM names."""
    path = os.environ.get("PEARL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "no chromium on this machine: apt-get install chromium"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Visit:
    """A page with all its requests, errors and console messages."""

    def __init__(self, context):
        self.requests, self.errors = [], []
        context.on("request", lambda request: self.requests.append(request.url))
        self.page = context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.set_default_timeout(30_000)


@pytest.fixture
def visit(chromium):
    """Opens pages; `visit(url, size, scheme)`. Afterwards no page may have had an error."""
    contexts, visits = [], []

    def open_(url, size="wide", scheme="light", **options):
        width, height = SIZES[size]
        viewport = {"width": width, "height": height}
        context = chromium.new_context(viewport=viewport, color_scheme=scheme, **options)
        contexts.append(context)
        visits.append(Visit(context))
        visits[-1].page.goto(url)
        return visits[-1]

    yield open_
    for context in contexts:
        context.close()
    assert [error for visited in visits for error in visited.errors] == []


@pytest.fixture
def screenshot(tmp_path_factory):
    """Keeps a picture of a page, in PEARL_SCREENSHOTS where that is set, for people to look at."""
    folder = Path(os.environ.get("PEARL_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)

    def take(page, name):
        path = folder / f"{name}.png"
        page.screenshot(path=path, full_page=True)
        assert path.stat().st_size > 10_000
        return path

    return take


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` (WCAG 2)."""
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """Contrast of two colours, 1 to 21 (WCAG 2)."""
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.fixture
def check_readable():
    """Asserts that the text of each selector stands out from what is behind it."""
    return readable


def readable(page, selectors):
    script = """(element) => {
      let behind = element, colour = "rgba(0, 0, 0, 0)";
      while (behind && colour === "rgba(0, 0, 0, 0)") {
        colour = getComputedStyle(behind).backgroundColor; behind = behind.parentElement;
      }
      return [getComputedStyle(element).color, colour];
    }"""
    for selector in selectors:
        found = page.locator(selector).first.evaluate(script)
        assert contrast(*found) >= 4.5, (selector, found)

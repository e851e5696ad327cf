"""A report says what the run's records say, lets no string of a run become markup, and asks nobody for anything."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from pearl_rl.cli.app import app
from pearl_rl.errors import CommandError
from pearl_rl.report.charts import CHARTS, LEARNING, staleness_histogram, step_shares
from pearl_rl.report.diagnosis import Level, diagnose, reward_ends
from pearl_rl.report.page import comparison_page, flat, lent_gpu_seconds, run_page, script_json, tiles
from pearl_rl.report.raster import png
from pearl_rl.report.run_record import percentiles, read_run
from pearl_rl.report.standalone import framed, standalone_plots
from pearl_rl.report.svg import Plot, number, ticks, time_ticks
from pearl_rl.report.table_history import configuration_text, gpu_words, lanes, levels, snapshots
from pearl_rl.report.thinning import buckets, means, sums
from pearl_rl.report.timeline import timeline
from pearl_rl.run_folder import RunFolder, read_decisions
from pearl_rl.simulation.cluster import simulate
from pearl_rl.simulation.scenario import load_scenario

SMALL = ("rollout.batch=16", "rollout.group_size=4", "run.steps=3", "workload.max_turns=3")
HOSTILE = '"><script>alert(1)</script><img src=//x.test/a>\u2028'
SHOWN = [chart for chart in CHARTS if chart.key not in LEARNING]
"""What a simulation has something for: it learns nothing."""
VOID = {"meta", "link", "input", "img", "br"}


class Page(HTMLParser):
    """Checks that elements close in order, and keeps what could load something."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.tags, self.text = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [
            value for key, value in attrs if key in ("src", "href", "action", "srcset") and value != "data:,"
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    scenario = load_scenario("paper-segment1", SMALL)
    path = tmp_path_factory.mktemp("report") / "run"
    with RunFolder.create_simulation(scenario.model_dump(), path) as made:
        made.write_summary(simulate(scenario, folder=made).to_json(full=False))
    return path


@pytest.fixture(scope="module")
def run(folder):
    return read_run(folder)


# ---- what it reads --------------------------------------------------------------------------------------------------


def test_the_record_sums_up_what_the_simulation_says_of_itself(run):
    assert run.summary is not None
    assert run.throughput == pytest.approx(run.summary["throughput_tokens_per_s"])
    assert run.wape == pytest.approx(run.summary["prediction_wape"])
    assert len(run.steps) == 3
    assert run.turns >= 3 * 16
    assert sum(part.share for part in run.latency.values()) == pytest.approx(1)


def test_levels_never_exceed_the_gpus_of_the_scenario(run):
    cluster = run.config["cluster"]
    for level in run.levels:
        assert level.reserved_gpus <= cluster["reserved_rollout_gpus"]
        assert level.preemptible_gpus <= cluster["max_preemptible_gpus"]
        assert level.borrowed_gpus <= cluster["training_gpus"]
    times = [level.at_s for level in run.levels]
    assert times == sorted(set(times))


def test_lanes_hold_each_worker_once_at_a_time(run):
    assert run.lanes[0].group == "training"
    for lane in run.lanes:
        for span, following in zip(lane.spans, lane.spans[1:], strict=False):
            assert span.start_s < span.end_s <= following.start_s


def row(role="colocated", lifecycle="active", zone="dedicated", tenure="reserved", gpus=(1,)):
    return {"role": role, "lifecycle": lifecycle, "zone": zone, "tenure": tenure, "gpus": list(gpus), "cordoned": False}


def test_the_table_history_follows_changes_and_departures():
    lines = [
        {
            "now_s": 0.0,
            "rows": {"0": row("training", zone="overlap", gpus=(0,)), "3": row()},
            "gone": [],
            "training": "idle",
        },
        {
            "now_s": 2.0,
            "rows": {"3": row("prefill"), "4": row("decode", tenure="preemptible")},
            "gone": [],
            "training": "running",
        },
        {"now_s": 5.0, "rows": {}, "gone": [4], "training": "idle"},
    ]
    history = list(snapshots(lines))
    assert [configuration_text(snapshot.rows.values()) for snapshot in history] == ["1C", "1P1D", "1P0D"]
    assert [(level.at_s, level.gpus) for level in levels(history)] == [(0.0, 1), (2.0, 2), (5.0, 1)]
    by_name = {lane.name: [(s.start_s, s.end_s, s.role, s.state) for s in lane.spans] for lane in lanes(history, 9.0)}
    assert by_name["training, 1 GPU"][1] == (2.0, 5.0, "training", "running")
    assert by_name["4 on GPU 1"] == [(2.0, 5.0, "decode", "active")]
    assert by_name["3 on GPU 1"] == [(0.0, 2.0, "colocated", "active"), (2.0, 9.0, "prefill", "active")]


def test_a_process_that_goes_on_begins_with_a_whole_table():
    first = {"now_s": 0.0, "rows": {"3": row(), "4": row()}, "gone": [], "training": "idle", "fresh": True}
    again = {"now_s": 9.0, "rows": {"5": row()}, "gone": [], "training": "idle", "fresh": True}
    assert [set(snapshot.rows) for snapshot in snapshots([first, again])] == [{3, 4}, {5}]


def test_gpus_in_words():
    assert [gpu_words(ids) for ids in ([4], [5, 4], [7, 4])] == ["GPU 4", "GPU 4-5", "GPU 4,7"]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
@settings(max_examples=30)
def test_percentiles_are_values_in_order(values):
    found = percentiles(values, sum(values))
    assert min(values) <= found.p50_s <= found.p90_s <= found.p99_s <= max(values)
    assert {found.p50_s, found.p99_s} <= set(values)


def test_parts_of_a_step_add_up_to_its_duration(run):
    for step in run.steps:
        shares = step_shares(step)
        assert sum(shares.values()) == pytest.approx(step["duration_s"])
        assert min(shares.values()) >= 0


def test_a_running_job_has_a_report_that_says_so(folder, tmp_path):
    for path in folder.iterdir():
        if path.name != "summary.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"Rollo')
    found = diagnose(read_run(tmp_path))
    assert any("3 of 3 steps are complete" in finding.text for finding in found)


def test_a_run_that_went_on_is_one_line_of_time(folder, tmp_path):
    for path in folder.iterdir():
        text = path.read_text()
        if path.suffix == ".jsonl":
            # The same once more, as a second process of the run would write it.
            again = [json.loads(line) for line in text.splitlines()]
            for line in again:
                if "number" in line:
                    line["number"] += len(read_decisions(folder / "decisions.jsonl"))
            text += "".join(json.dumps(line) + "\n" for line in again)
        (tmp_path / path.name).write_text(text)
    once, twice = read_run(folder), read_run(tmp_path)
    assert len(twice.steps) == 2 * len(once.steps)
    times = [step["now_s"] for step in twice.steps]
    assert times == sorted(times)
    assert twice.end_s == pytest.approx(2 * once.end_s, rel=0.01)
    starts = [level.at_s for level in twice.levels]
    assert starts == sorted(set(starts))
    Page(run_page(twice))
    spans_ = [event for event in timeline(tmp_path) if event["ph"] == "X"]
    assert max(event["ts"] for event in spans_) > 1e6 * once.end_s
    assert all(event["dur"] >= 0 for event in spans_)


# ---- what it shows --------------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_loads_nothing(run):
    text = run_page(run)
    page = Page(text)
    assert page.loads == []
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|EventSource", text)
    assert "default-src 'none'" in text.replace("&#x27;", "'")
    assert page.tags.count("section") >= len(SHOWN)


def test_the_tiles_carry_the_values_of_the_run(run):
    shown = {key: value for key, value, _ in tiles(run)}
    assert shown["throughput"] == number(run.summary["throughput_tokens_per_s"])
    assert shown["steps"] == "3"
    assert shown["borrows"] == str(run.summary["counts"]["borrows"])
    assert shown["lost"] == "0"


def test_every_decision_is_there_with_all_its_candidates(run):
    text = run_page(run)
    assert text.count('<details class="decision"') == len(run.decisions) > 0
    shown = sum(len(line["decision"]["candidates"]) for line in run.decisions)
    assert len(re.findall(r"<tr(?: class=chosen)?><td>\d+(?:C|P\d+D)</td>", text)) == shown


def test_no_string_of_a_run_becomes_markup(run, folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    scenario = json.loads((folder / "scenario.json").read_text())
    scenario["name"] = scenario["about"] = scenario["model"] = HOSTILE
    (tmp_path / "scenario.json").write_text(json.dumps(scenario))
    events = {"event": "WorkerFailed", "now_s": 1.0, "worker": 1, "incarnation": 1, "cause": HOSTILE}
    (tmp_path / "events.jsonl").write_text(json.dumps(events) + "\n")
    lines = [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]
    for line in lines:
        if "decision" in line:
            line["trigger"], line["decision"]["limits"] = HOSTILE, [HOSTILE]
            line["decision"]["budget_workers"] = HOSTILE
    (tmp_path / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = dict.fromkeys(("colocated_s", "decoupled_s", "reform_s"), 1.0)
    mode = {"mode": HOSTILE, "ras": HOSTILE, "changes": True, **times}
    (tmp_path / "update_modes.jsonl").write_text(
        json.dumps({"now_s": 1.0, "version": HOSTILE, "measured_s": 1.0, "decision": mode}) + "\n"
    )
    page = Page(run_page(read_run(tmp_path)))
    assert page.loads == []
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert any("alert(1)" in text for text in page.text)


def test_a_figure_that_is_none_is_one_line(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text.replace('"staleness_max":', '"staleness_max":"x","_":'))
    with pytest.raises(CommandError, match=r"cannot be read as a run .*; is a file of it damaged"):
        run_page(read_run(tmp_path))


@given(st.text())
@settings(max_examples=50)
def test_script_data_cannot_leave_its_element(text):
    data = script_json({"a": text})
    assert not set(data) & set("<>&\u2028\u2029")
    assert json.loads(data) == {"a": text}


def test_every_chart_is_drawn_at_both_widths(run):
    for chart in SHOWN:
        for width in (346, 1080):
            plot = chart.draw(run, width)
            assert plot is not None, chart.key
            assert "nan" not in plot.svg().lower()


def test_a_run_without_steps_has_a_page(tmp_path):
    with RunFolder.create_simulation(load_scenario("webshop").model_dump(), tmp_path / "run") as made:
        run = read_run(made.path)
    Page(run_page(run))
    assert [finding.level for finding in diagnose(run)] == [Level.NOTE]


def test_no_policy_is_left_out_where_there_are_more_runs_than_colours(run):
    runs = [
        replace(run, name=f"{p} {seed}", config={**run.config, "run": {**run.config["run"], "seed": seed}})
        for p in "abc"
        for seed in range(3)
    ]
    legend = comparison_page(runs, "nine").partition('data-chart="makespans"')[2].partition("</ul>")[0]
    assert "The first 6 of 9 runs, by seed." in legend
    assert re.findall(r"</i>([^<]*)<", legend) == ["a 0", "b 0", "c 0", "a 1", "b 1", "c 1"]


def test_several_runs_are_compared_with_the_first(run):
    text = comparison_page([run, run], "twice")
    Page(text)
    assert text.count('<article class="run">') == 2
    assert "<td>1.000</td>" in text
    chart = text.partition('data-chart="makespans"')[2].partition("</section>")[0]
    # At both widths a line for each, in colours that the legend names.
    for colour in ("decode", "prefill"):
        assert chart.count(f'<polyline class="line {colour}"') == 2
        assert f'<i class="{colour}"></i>{run.name}' in chart


@pytest.mark.parametrize(
    ("rewards", "ends", "level"),
    [
        ([0.1, 0.3, 0.2, 0.2], (0.2, 0.2, 2), Level.NOTE),
        ([0.1] * 10 + [0.2] * 12, (0.1, 0.2, 10), Level.GOOD),
        ([0.2] * 10 + [0.1] * 12, (0.2, 0.1, 10), Level.WARNING),
    ],
)
def test_learning_is_judged_by_steps_that_are_not_the_same_ones(run, rewards, ends, level):
    steps = [{**run.steps[0], "step": n, "reward_mean": reward} for n, reward in enumerate(rewards, 1)]
    trained = replace(run, simulated=False, steps=steps)
    assert reward_ends(trained) == pytest.approx(ends)
    (finding,) = [finding for finding in diagnose(trained) if finding.text.startswith("Reward went")]
    assert finding.level is level


def as_trained(run, **summary):
    """The run as if it had trained."""
    measures = {"gradient_norm": 0.5, "clipped_fraction": 0.25, "loss": 0.1, "kl": 0.0, "reward_mean": 0.0}
    return replace(run, simulated=False, steps=[{**step, **measures} for step in run.steps], summary=summary)


def test_updates_are_drawn_for_what_trained_and_not_for_what_is_simulated(run):
    chart = next(chart for chart in CHARTS if chart.key == "update")
    assert chart.draw(run, 1080) is None
    drawn = chart.draw(as_trained(run), 1080).svg()
    assert drawn.count("25 % of the tokens clipped, gradient norm 0.5, loss 0.1, KL 0<") == len(run.steps)


def test_a_tile_says_what_its_throughput_counts(run):
    words = {key: meaning for key, _, meaning in tiles(as_trained(run, tokens_per_s=12.0))}
    assert words["throughput"] == "tokens/s over all steps, generated and trained; 12 with start-up"
    assert tiles(run)[0][2] == "tokens/s over all steps, generated and trained"


def test_a_training_run_is_compared_by_its_counts_too(run):
    trained = replace(run, summary={"borrows": 701, "mode_switches": 400, "ratio_switches": 44})
    cells = re.findall(r"<td>([^<]*)</td>", comparison_page([trained], "one").partition('data-table="comparison"')[2])
    assert cells[6:8] == ["701", "444"]


def test_plots_stand_alone(run):
    names = {name for name, text in standalone_plots(run) if text.startswith("<svg") and "--ink" in text}
    assert names == {chart.key for chart in SHOWN}


def test_a_png_shows_what_the_svg_does_where_it_does():
    plot = Plot(200, 100, (0.0, 10.0), (0.0, 1.0), "<marks> & \x7f", left=0, right=0, top=0, bottom=0)
    plot.bar(0.0, 5.0, 0.0, 1.0, "decode")
    plot.bar(5.0, 10.0, 0.0, 0.5, "prefill pale")
    plot.line([(5.5, 0.75), (9.5, 0.75)], "ink")
    plot.line([(9.0, 0.9)], "predicted")
    plot.text(110, 20, "words", css="axis")
    image = Image.open(io.BytesIO(png(framed(plot, "title \x1b[31m \ud800"))))
    head = 34
    assert image.size == (400, 2 * (100 + head + 6))

    def is_at(x, y, colour):
        seen, wanted = image.getpixel((2 * x, 2 * (y + head))), bytes.fromhex(colour)
        # Edges are smooth, and a line of two pixels has little else.
        return all(abs(one - other) < 16 for one, other in zip(seen, wanted, strict=True))

    assert is_at(50, 50, "2f6fde")
    assert is_at(150, 25, "1c2024")
    assert is_at(180, 10, "d9760f")
    assert is_at(150, 75, "eec8a1")  # The paler one, on the paper.
    assert is_at(150, 40, "fbfbfa")
    assert is_at(103, 5, "fbfbfa")
    assert not all(is_at(x, y, "fbfbfa") for x in range(110, 140) for y in range(10, 20))


def test_the_histogram_counts_every_trajectory(run):
    assert sum(staleness_histogram(run).values()) == sum(step["trajectories"] for step in run.steps)


def test_lent_time_is_that_of_borrowed_workers(run):
    text = run_page(run)
    lent = lent_gpu_seconds(run)
    assert (lent > 0) is (run.summary["counts"]["borrows"] > 0)
    assert ("Nothing was lent" in text) is (lent == 0)
    with_, without = (sum(bool(step["borrowed"]) is lent for step in run.steps) for lent in (True, False))
    assert (f"<td>with borrowed workers</td><td>{with_}</td>" in text) is (with_ > 0)
    assert (f"<td>without</td><td>{without}</td>" in text) is (without > 0)


def test_settings_are_listed_by_dotted_key():
    assert list(flat({"a": {"b": 1, "c": {}}, "d": "x"}, {"a.b": "--set"})) == [
        ("a.b", 1, "--set"),
        ("a.c", {}, ""),
        ("d", "x", ""),
    ]


# ---- drawing --------------------------------------------------------------------------------------------------------


@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e6), st.integers(1, 20))
@settings(max_examples=60)
def test_ticks_are_few_and_inside(low, span, most):
    found = ticks(low, low + span, most)
    assert len(found) <= most + 1
    assert all(low - span * 1e-6 <= value <= low + span * (1 + 1e-6) for value in found)


def test_time_is_marked_in_the_unit_that_suits():
    assert [text for _, text in time_ticks(0, 60, 3)] == ["0 s", "30 s", "60 s"]
    assert time_ticks(0, 7200, 4)[-1][1] == "120 min"
    assert time_ticks(0, 86_400, 4)[-1][1].endswith(" h")


def test_a_plot_that_stands_alone_has_its_title_and_its_legend_on_lines_of_their_own():
    text = framed(Plot(320, 100, (0.0, 1.0), (0.0, 1.0), "x"), "long" * 20, [("decode", "word" * 4)] * 5)
    places = [tuple(map(int, found)) for found in re.findall(r'swatch" x="(\d+)" y="(\d+)"', text)]
    assert len(set(places)) == 5
    assert all(x < 320 and y > 30 for x, y in places)
    # Two fit beside each other.
    assert [y for _, y in places] == [34, 34, 56, 56, 78]


def test_positions_follow_the_data():
    plot = Plot(200, 100, (0.0, 10.0), (0.0, 1.0), "x", left=20, right=0, top=0, bottom=20)
    assert (plot.px(0), plot.px(10)) == (20, 200)
    assert (plot.py(0), plot.py(1)) == (80, 0)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_the_plots(folder, tmp_path):
    out = tmp_path / "deep" / "r.html"
    result = CliRunner().invoke(app, ["report", str(folder), "-o", str(out), "--plots", str(tmp_path / "plots")])
    assert result.exit_code == 0
    assert out.read_text().startswith("<!doctype html>")
    assert len(list((tmp_path / "plots").glob("*.svg"))) == len(SHOWN)
    assert {path.stem for path in (tmp_path / "plots").glob("*.png")} == {
        path.stem for path in (tmp_path / "plots").glob("*.svg")
    }


@pytest.mark.parametrize("make", [lambda path: path / "none", lambda path: path])
def test_what_is_no_run_is_refused_in_one_line(tmp_path, make, capsys):
    assert app(["report", str(make(tmp_path))], standalone_mode=False) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "give the folder of a run" in error


def test_a_damaged_file_is_named_in_one_line(folder, tmp_path, capsys):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "metrics.jsonl").write_text("[1]\n")
    assert app(["report", str(tmp_path)], standalone_mode=False) == 2
    assert "damaged" in capsys.readouterr().err


def test_a_simulation_of_several_policies_has_one_page_and_keeps_its_records(tmp_path):
    out, kept = tmp_path / "s.html", tmp_path / "kept"
    given_ = [word for value in SMALL for word in ("--set", value)]
    result = CliRunner().invoke(
        app, ["simulate", "webshop", "--policy", "rlboost,pearl", *given_, "--report", str(out), "--record", str(kept)]
    )
    assert result.exit_code == 0, result.output
    text = out.read_text()
    Page(text)
    assert text.count('<article class="run">') == 2
    assert {path.name for path in kept.iterdir()} == {"rlboost-0", "pearl-0"}
    assert len(read_run(kept / "pearl-0").steps) == 3


# ---- long runs ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(1, 60))
@settings(max_examples=40)
def test_buckets_cover_everything_once(length, most):
    parts = buckets(length, most)
    assert len(parts) <= most
    assert [index for part in parts for index in range(length)[part]] == list(range(length))


def test_thinned_steps_keep_rates_and_extremes(run):
    steps = [
        {**run.steps[0], "step": n, "duration_s": 2.0, "staleness_max": n, "reward_mean": float(n)}
        for n in range(1, 101)
    ]
    few, rates = means(steps, 10), sums(steps, 10)
    assert len(few) == len(rates) == 10
    assert (few[0]["step"], few[0]["reward_mean"], few[0]["staleness_max"]) == (10, 5.5, 10)
    assert rates[0]["duration_s"] == 20.0
    assert rates[0]["generated_tokens"] == 10 * steps[0]["generated_tokens"]
    assert means(steps, 100) is steps


def test_the_page_of_a_long_run_stays_small(run):
    from dataclasses import replace

    steps = [{**run.steps[n % 3], "step": n + 1, "now_s": 10.0 * (n + 1), "duration_s": 10.0} for n in range(4_000)]
    latency = {n + 1: run.step_latency[1 + n % 3] for n in range(4_000)}
    long = replace(
        run,
        steps=steps,
        end_s=40_000.0,
        decisions=list(run.decisions) * 300,
        gates=list(run.gates) * 300,
        step_latency=latency,
    )
    text = run_page(long)
    Page(text)
    assert len(text) < 6_000_000
    assert text.count('<details class="decision"') == 400
    assert f"The {len(long.decisions) - 400:,} earlier ones" in text


def test_advice_names_the_keys_of_what_the_run_was_configured_by(run):
    """A simulation has the keys of a scenario, a run those of a job."""
    steps = [
        {**step, "predicted_rollout_s": 9 * step["rollout_s"], "wait_bound_s": step["duration_s"]} for step in run.steps
    ]
    for record, keys in (
        (replace(run, steps=steps), ("policy.ratio_threshold", "rollout.max_staleness")),
        (replace(run, steps=steps, simulated=False), ("planner.ratio_threshold", "train.max_staleness_versions")),
    ):
        told = " ".join(finding.text for finding in diagnose(record))
        assert all(f" {key} " in f" {told} " for key in keys)

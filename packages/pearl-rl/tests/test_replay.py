"""A recorded run plays again in the simulator: its turns, tokens, updates and GPUs, or with other settings."""

import asyncio
import json
import shutil

import pytest
from typer.testing import CliRunner

from pearl_executor.virtual_time import run_virtual
from pearl_rl.cli.app import app
from pearl_rl.cli.replay import calibrated
from pearl_rl.cli.what_if import parse_knob
from pearl_rl.encoding import encode
from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.observer import StepRecord
from pearl_rl.run_folder import RunFolder
from pearl_rl.settings import load_settings
from pearl_rl.simulation.engine import Engine
from pearl_rl.simulation.kernels import DecodeCurve
from pearl_rl.simulation.replay import PacedCosts, RecordedSource, RecordedUpdates, ReplayedCluster, read_recorded
from pearl_rl.simulation.requests import EngineRequest, SimulatedEngineLimits
from pearl_state.events import GpusOffered, GpusReclaimed
from pearl_state.roles import Tenure
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn, WeightSpan
from pearl_state.worker import GpuId

JOB = (
    "run.steps=3",
    "rollout.batch_size=4",
    "train.group_size=2",
    "train.groups_per_step=2",
    "cluster.max_preemptible_gpus=2",
)
UPDATES = (0.5, 0.7, 0.9)


def ids(*numbers):
    return frozenset(GpuId(number) for number in numbers)


def trajectory(number):
    turn = Turn(
        prompt=[1] * 20,
        response=[2] * (5 + number),
        logprobs=[-1.0] * (5 + number),
        spans=(WeightSpan(0, 5 + number),),
        environment_s=0.25,
        prefill_s=0.01,
        decode_s=0.1,
        queue_s=0.02,
        started_s=1.0,
        finished_s=1.2,
    )
    return Trajectory(
        id=TrajectoryId(f"t{number:08d}"),
        group=GroupId(f"g{number // 2:06d}"),
        task=f"{number // 2}",
        turns=(turn, turn),
        reward=1.0,
        dispatch_version=0,
        started_s=0.0,
        finished_s=2.0,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder as `train` leaves it, with figures that are easy to recognize."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    with RunFolder.create(load_settings(None, JOB), path) as folder:
        folder.record_event(GpusOffered(now_s=20.0, gpus=ids(2, 3), tenure=Tenure.RESERVED))
        folder.record_event(GpusOffered(now_s=20.0, gpus=ids(4, 5)))
        folder.record_event(GpusReclaimed(now_s=24.0, gpus=ids(5), deadline_s=26.0))
        for number in range(12):
            folder.record_trajectory(trajectory(number), step=1 + number // 4)
        for number, training_s in enumerate(UPDATES, start=1):
            folder.record_step(
                StepRecord(
                    step=number,
                    steps=3,
                    now_s=20.0 + 3 * number,
                    reward_mean=1.0,
                    generated_tokens=100,
                    trained_tokens=200,
                    duration_s=3.0,
                    rollout_s=2.0,
                    training_s=training_s,
                )
            )
        (path / "model").mkdir()
        config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
        (path / "model" / "config.json").write_text(json.dumps(config))
    return path


def play(run, *overrides):
    async def main():
        return await ReplayedCluster(read_recorded(run, overrides)).run()

    return run_virtual(main())


def test_a_replay_makes_the_recorded_steps_with_the_recorded_updates_and_tokens(run):
    result = play(run)
    assert [step.training_s for step in result.steps] == pytest.approx(UPDATES)
    assert [step.generated_tokens for step in result.steps] == [
        2 * sum(5 + number for number in range(4 * k, 4 * k + 4)) for k in range(3)
    ]
    assert result.counts.reclaims == 1
    assert result.counts.lost_trajectories == 0


def test_a_replay_repeats_exactly(run):
    assert play(run).to_json() == play(run).to_json()


def test_environment_times_are_kept_and_time_beside_the_engine_is_added(run):
    cluster = ReplayedCluster(read_recorded(run))
    script = cluster.workload.script(None, 3)
    assert [turn.response_tokens for turn in script.turns] == [8, 8]
    # 0.2 s of the call, of which the engine had 0.13 s.
    assert script.turns[0].tool_s == pytest.approx(0.25 + 0.07)


def test_more_preemptible_gpus_expand_the_pool_and_fewer_leave_recorded_ones_out(run):
    few, many = play(run, "cluster.max_preemptible_gpus=0"), play(run, "cluster.max_preemptible_gpus=6")
    assert max(interval.rollout_gpus for interval in few.timeline) == 2
    assert max(interval.rollout_gpus for interval in many.timeline) == 8
    assert few.counts.reclaims == 0


def test_without_borrowing_nothing_is_borrowed(run):
    assert play(run, "cluster.borrowing=off").counts.borrows == 0


def test_changes_are_named_by_their_keys(run):
    assert read_recorded(run).changed == frozenset()
    assert read_recorded(run, ["cluster.borrowing=off"]).changed == {"cluster.borrowing"}


def test_another_number_of_training_gpus_is_refused(run, capsys):
    words = ["replay", str(run), "--set", "cluster.training_gpus=4"]
    assert app(words, standalone_mode=False) == 2
    assert "replay cannot change their number" in capsys.readouterr().err


def test_a_gpu_is_offered_again_only_once_it_was_returned():
    async def main():
        source = RecordedSource(
            [
                GpusOffered(now_s=0.0, gpus=ids(4)),
                GpusReclaimed(now_s=1.0, gpus=ids(4), deadline_s=3.0),
                GpusOffered(now_s=2.0, gpus=ids(4)),
            ]
        )
        asyncio.get_running_loop().call_later(5.0, source.returned, ids(4))
        return [event async for event in source.events()]

    offered, reclaimed, again = run_virtual(main())
    assert (offered.now_s, reclaimed.now_s, reclaimed.deadline_s) == (0.0, 1.0, 3.0)
    assert again.now_s == 5.0


def test_paced_costs_are_those_of_the_emulated_device():
    costs = PacedCosts(0.02, 0.001, 0.0005)
    assert costs.prefill_s([(100, 0), (50, 10)], 2) == pytest.approx(0.075)
    curve = costs.decode_curve(10)
    assert isinstance(curve, DecodeCurve)
    assert curve.run_s(1000.0, 7) == pytest.approx(7 * 0.03)


def test_recorded_updates_come_in_order_and_the_last_one_stays():
    updates = RecordedUpdates(gpu_s_per_token=0.0, durations_s=(1.0, 2.0))
    assert [updates.update_s(10, 2) for _ in range(3)] == [1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay", "/none"], "does not exist; give the folder of a run"),
        (["what-if", "webshop"], "needs something to vary"),
        (["what-if", "webshop", "--vary", "rollout.batch"], "is not like"),
        (["what-if", "webshop", "--vary", "rollout.bach=16"], "rollout.bach"),
        (["what-if", "webshop", "--vary", "rollout.batch=16,32", "--seeds", "0"], "must be 1 to"),
        (["what-if", "no-such", "--vary", "rollout.batch=16"], "no scenario"),
        (["what-if", "webshop", "--vary", "run.seed=1", "--seeds", "2"], "both choose seeds; use one of them"),
        (["what-if", "webshop", "--vary", "run.seed=1", "--policy", "roll,roll"], "names roll twice"),
        (["what-if", "webshop", "--vary", "run.seed=1", "--policy", ","], "--policy ,: names none"),
        (["what-if", "webshop", "--vary", "policy.name=roll", "--policy", "pearl"], "both choose policies"),
        (["what-if", "webshop", "--vary", "run.seed=1:900:1", "--vary", "tp=1,2"], "more than 1000 combinations"),
        # What is wrong with the last of many values is said before the first of them is simulated.
        (["what-if", "hyperscale", "--vary", "run.steps=1:500:1,zero"], "is not like"),
        (["what-if", "hyperscale", "--vary", "run.steps=1,2,zero"], "run.steps = zero: must be a whole number"),
        (["simulate", "webshop", "--policy", " , "], "names none"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys):
    assert app(words, standalone_mode=False) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("metrics.jsonl", '"training_s":', '"training_s":-5,"was":', "training_s = -5 of step 1"),
        ("trajectories.jsonl", '"environment_s":', '"environment_s":-5,"was":', "environment_s = -5"),
        ("trajectories.jsonl", '"environment_s":', '"environment_s":NaN,"was":', "environment_s = nan"),
        ("trajectories.jsonl", '"environment_s":', '"environment_s":1e308,"was":', "never finishes"),
        ("events.jsonl", None, "", "has no events.jsonl with events: when its GPUs came and went is not known"),
    ],
)
def test_a_damaged_recording_is_one_line_and_no_figure(run, tmp_path, capsys, file, old, new, said):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    text = (folder / file).read_text()
    assert old is None or old in text
    (folder / file).write_text(new if old is None else text.replace(old, new, 1))
    assert app(["replay", str(folder)], standalone_mode=False) in (ExitCode.CONFIG, ExitCode.INFEASIBLE)
    found = capsys.readouterr()
    assert found.out == ""
    assert said in found.err
    assert found.err.count("\n") == 1


def test_a_recording_that_lacks_trajectories_says_so_beside_its_figures(run, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"trajectories":0', '"trajectories":4'))
    lines = (folder / "trajectories.jsonl").read_text().splitlines(keepends=True)
    assert read_recorded(folder).missing == 0
    (folder / "trajectories.jsonl").write_text("".join(lines[:-3]))
    assert app(["replay", str(folder)], standalone_mode=False) == ExitCode.OK
    said = capsys.readouterr().out
    assert "3 of 12 trajectories are not in trajectories.jsonl: others were played in their place" in said


def test_a_run_without_a_step_cannot_be_replayed(tmp_path):
    with RunFolder.create(load_settings(), tmp_path / "run"):
        pass
    with pytest.raises(CommandError, match="no step"):
        read_recorded(tmp_path / "run")


def test_the_command_compares_recorded_replayed_and_changed(run, tmp_path):
    words = ["replay", str(run), "--set", "cluster.borrowing=off", "--json", "--report", str(tmp_path / "r.html")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["results"]
    assert [row["name"] for row in rows] == ["recorded", "replayed", "cluster.borrowing=off"]
    assert rows[0]["throughput_tokens_per_s"] == pytest.approx(100)
    assert rows[2]["borrows"] == 0
    assert (tmp_path / "r.html").read_text().count('<article class="run">') == 2


def test_workers_are_slowed_down_until_batches_take_what_they_took(run):
    recorded, result = calibrated(run)
    as_stated = play(run)
    assert recorded.slowdown > 1
    assert abs(result.rollout_s - 2.0) < abs(as_stated.rollout_s - 2.0)
    assert result.rollout_s == pytest.approx(2.0, rel=0.1)


def test_a_recorded_run_is_swept(run, capsys):
    words = ["what-if", str(run), "--vary", "cluster.max_preemptible_gpus=0:2:2", "--json"]
    assert app(words, standalone_mode=False) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [row["set"] for row in found] == [{"cluster.max_preemptible_gpus": value} for value in ("0", "2")]
    assert found[1]["rollout_s"] <= found[0]["rollout_s"]


def test_knobs_are_lists_or_ranges():
    assert parse_knob("a.b=1, 2") == ("a.b", ["1", "2"])
    assert parse_knob("a=0:12:4") == ("a", ["0", "4", "8", "12"])
    assert parse_knob("a=0.1:0.3:0.1") == ("a", ["0.1", "0.2", "0.3"])
    for bad in ("a", "a=", "a=1,,2", "a=1,1", "a=0:1:0", "a=x:1:2", "a=5:1:1"):
        with pytest.raises(CommandError):
            parse_knob(bad)


def test_a_sweep_prints_every_point_and_draws_it(tmp_path):
    sets = [
        word for value in ("rollout.group_size=4", "run.steps=1", "workload.max_turns=2") for word in ("--set", value)
    ]
    words = ["what-if", "webshop", "--vary", "rollout.batch=8,16", "--policy", "rlboost,pearl", *sets]
    result = CliRunner().invoke(app, [*words, "--json", "--plot", str(tmp_path / "p.svg")])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["results"]
    assert [(row["set"]["rollout.batch"], row["policy"]) for row in found] == [
        ("8", "rlboost"),
        ("16", "rlboost"),
        ("8", "pearl"),
        ("16", "pearl"),
    ]
    drawn = (tmp_path / "p.svg").read_text()
    for row in found:
        assert f"{row['name']}: {row['throughput_tokens_per_s']:,.0f} tokens/s" in drawn


def test_the_table_shows_every_point(capsys):
    words = ["what-if", "webshop", "--vary", "rollout.batch=8,16"]
    sets = [
        word for value in ("rollout.group_size=4", "run.steps=1", "workload.max_turns=2") for word in ("--set", value)
    ]
    assert app([*words, *sets], standalone_mode=False) == 0
    text = capsys.readouterr().out
    assert "rollout.batch=8 " in text
    assert "█" in text


def test_events_of_a_run_are_read_back_as_they_were(run):
    recorded = read_recorded(run)
    assert [encode(event)["now_s"] for event in recorded.availability] == [0.0, 0.0, 4.0]
    assert recorded.availability[-1].deadline_s == 6.0


@pytest.mark.parametrize(("switch_s", "total_s"), [(0.0, 0.1 + 2 * 0.021), (0.5, 0.1 + 0.5 + 2 * 0.021)])
def test_a_change_of_phase_costs_once(switch_s, total_s):
    limits = SimulatedEngineLimits(kv_tokens=10_000, phase_switch_s=switch_s)
    engine = Engine(PacedCosts(0.02, 0.001, 0.001), limits)
    engine.submit(EngineRequest(rid="a", prompt_tokens=100, new_tokens=3), 0.0)
    last_s = 0.0
    while engine.wake_s is not None:
        last_s = engine.wake_s
        engine.advance()
    assert last_s == pytest.approx(total_s)

"""Our settings as other frameworks' configurations: `import` reads back what `export` wrote, and the rest is named."""

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pearl_rl.cli.app import app
from pearl_rl.cli.exporting import _WRITERS, exported
from pearl_rl.cli.importing import _READERS, read_configuration
from pearl_rl.errors import SettingsError
from pearl_rl.frameworks import NAMES
from pearl_rl.settings import load_settings

SUFFIX = {"verl": ".sh", "slime": ".sh", "roll": ".yaml", "areal": ".yaml"}
JOB = ("cluster.max_preemptible_gpus=0", "availability.source=fixed")

whole = st.integers
share = st.floats(0.01, 0.9).map(lambda value: round(value, 3))


@st.composite
def jobs(draw: Any) -> list[str]:
    """Overrides of a job with any of the values that frameworks have too."""
    size = draw(st.sampled_from([1, 2, 4]))
    workers = draw(whole(2, 6))
    groups, minibatches, group = draw(whole(1, 4)), draw(whole(1, 3)), draw(whole(2, 6))
    groups *= minibatches
    context = draw(whole(256, 4096))
    prefill = draw(whole(1, workers - 1))
    values: dict[str, object] = {
        "cluster.gpus_per_worker": size,
        "cluster.training_gpus": size * draw(whole(1, 5)),
        "cluster.reserved_rollout_gpus": size * workers,
        "cluster.borrowing": draw(st.sampled_from(["off", "gated"])),
        "train.groups_per_step": groups,
        "train.group_size": group,
        "train.minibatches": minibatches,
        "rollout.batch_size": groups * group,
        "model.max_context_tokens": context,
        "rollout.max_new_tokens": draw(whole(8, context // 2)),
        "rollout.max_turns": draw(whole(2, 50)),
        "rollout.temperature": draw(share),
        "rollout.top_p": draw(share),
        "train.max_staleness_versions": draw(whole(0, 4)),
        "train.learning_rate": draw(st.sampled_from([1e-6, 3.7e-5, 0.001])),
        "train.weight_decay": draw(share),
        "train.warmup_updates": draw(whole(0, 20)),
        "train.clip_low": draw(share),
        "train.clip_high": draw(share),
        "train.kl_coefficient": draw(st.sampled_from([0.0, 0.01])),
        "train.epochs": draw(whole(1, 3)),
        "train.aggregation": draw(st.sampled_from(["token_mean", "sequence_mean"])),
        "train.baseline": draw(st.sampled_from(["mean_std", "mean", "none"])),
        "train.micro_batch_tokens": draw(whole(4096, 99_999)),
        "train.checkpoint_every_steps": draw(whole(1, 30)),
        "run.steps": draw(whole(1, 500)),
        "run.seed": draw(whole(0, 99)),
    }
    if draw(st.booleans()):
        values |= {"planner.policy": "static_pd", "planner.configuration": f"{prefill}P{workers - prefill}D"}
    return [*JOB, *(f"{key}={json.dumps(value)}" for key, value in values.items())]


def value_of(resolved: Any, key: str) -> object:
    node = resolved.settings
    for part in key.split("."):
        node = getattr(node, part)
    return node


@pytest.mark.parametrize("framework", NAMES)
@settings(max_examples=10, deadline=None)
@given(overrides=jobs())
def test_import_reads_back_what_export_wrote(framework: str, overrides: list[str]) -> None:
    resolved = load_settings(None, overrides)
    found, text = exported(framework, resolved, "job.toml")
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"job{SUFFIX[framework]}"
        path.write_text(text, encoding="utf-8")
        again = read_configuration(framework, path, None)
    # Besides what no key stands for, like the engine.
    assert [line for line in again.unsupported if not line.startswith("(")] == []
    written = {key for ours in found.origins.values() for key in ours} - {"train.algorithm"}
    # A zero is no penalty, and slime's flag for none is to have none.
    written -= {"train.kl_coefficient"} if not resolved.settings.train.kl_coefficient else set()
    dropped = {line.split(":")[0] for line in found.unsupported}
    for key in sorted(written - dropped):
        assert again.settings[key] == value_of(resolved, key), key
    # Every one of ours that differs is written, or named with its reason.
    for path_, origin in resolved.origins.items():
        key = ".".join(path_)
        if origin != "default":
            assert key in found.told or any(key.startswith(line.split(":")[0]) for line in found.unsupported), key


@pytest.mark.parametrize("framework", NAMES)
def test_what_import_gave_goes_back_to_where_it_came_from(framework: str, tmp_path: Path) -> None:
    first = tmp_path / f"first{SUFFIX[framework]}"
    first.write_text(exported(framework, load_settings(None, JOB), "x")[1])
    target, second = tmp_path / "job.toml", tmp_path / f"second{SUFFIX[framework]}"
    assert CliRunner().invoke(app, ["import", framework, str(first), "-o", str(target)]).exit_code == 0
    assert CliRunner().invoke(app, ["export", framework, str(target), "-o", str(second)]).exit_code == 0
    assert second.read_text().splitlines()[5:] == first.read_text().splitlines()[5:]


def test_disaggregation_and_elasticity_go_where_there_is_such() -> None:
    held = ["planner.policy=static_pd", "planner.configuration=2P4D", "cluster.reserved_rollout_gpus=6",
            "cluster.borrowing=gated", *JOB]  # fmt: skip
    resolved = load_settings(None, held)
    verl, slime, roll, areal = (exported(name, resolved, "x")[0] for name in NAMES)
    assert verl.values["actor_rollout_ref.rollout.disaggregation.prefill_replicas"] == 2
    assert verl.values["actor_rollout_ref.rollout.disaggregation.decode_replicas"] == 4
    assert verl.values["async_training.use_dynamic_resource_scheduling"] is True
    assert (slime.values["prefill-num-servers"], slime.values["rollout-num-gpus"]) == (2, 6)
    assert "cluster.borrowing: slime does not lend training GPUs to rollout" in slime.unsupported
    assert roll.values["actor_infer.device_mapping"] == "list(range(0,8))"
    assert "planner.configuration: ROLL's engines are colocated" in roll.unsupported
    assert areal.values["rollout.backend"] == "sglang:d6p1t1"
    assert areal.values["actor.backend"] == "fsdp:d2p1t1"


def test_preemptible_gpus_and_a_choosing_policy_are_named_also_where_they_are_the_default_job_s() -> None:
    for framework in NAMES:
        lines = exported(framework, load_settings(), "x")[0].unsupported
        named = [line.split(":")[0] for line in lines]
        assert {"cluster.max_preemptible_gpus", "planner.policy", "model.path"} <= set(named)
        assert len(named) == len(set(named))


def test_a_whole_section_without_counterpart_is_one_line() -> None:
    resolved = load_settings(None, [*JOB, "limits.executor.load_s=9", "limits.executor.sync_s=9", "device.paced=false"])
    lines = exported("slime", resolved, "x")[0].unsupported
    assert sorted(line for line in lines if line.startswith(("limits", "device"))) == [
        "device: they describe an emulated device",
        "limits: they bound waits inside PEARL",
    ]


@pytest.mark.parametrize("framework", ["verl", "slime"])
def test_scripts_are_valid_shell_also_with_odd_paths(framework: str, tmp_path: Path) -> None:
    model = tmp_path / "a model; and more"
    model.mkdir()
    (model / "config.json").write_text("{}")
    _, text = exported(framework, load_settings(None, [*JOB, f"model.path='{model}'"]), "x")
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", str(script)], check=False, timeout=30).returncode == 0
    assert read_configuration(framework, script, None).settings["model.path"] == str(model)


def test_the_command_prints_writes_or_says_json(tmp_path: Path) -> None:
    out = tmp_path / "agentic.yaml"
    words = ["export", "roll", "--set", "train.learning_rate=1e-6"]
    done = CliRunner().invoke(app, [*words, "-o", str(out)])
    assert done.exit_code == 0
    assert "learning_rate: 1.0e-06  # train.learning_rate" in out.read_text()
    assert done.stderr.count("no counterpart: ") == len(done.stderr.splitlines()) - done.stderr.count("look at ")
    assert CliRunner().invoke(app, words).stdout == out.read_text()
    body = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert body["values"]["actor_train.training_args.learning_rate"] == 1e-6
    assert body["origins"]["seed"] == ["run.seed"]


def test_every_framework_that_is_named_can_be_read_and_written() -> None:
    assert set(NAMES) == set(_READERS) == set(_WRITERS)


def test_bad_input_is_one_line() -> None:
    done = CliRunner().invoke(app, ["export", "trl"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "unknown framework; known: verl, slime, roll, areal" in done.stderr
    with pytest.raises(SettingsError, match=r"train\.groups_per_step = 8 does not divide by train\.minibatches = 3"):
        exported("verl", load_settings(None, [*JOB, "train.minibatches=3"]), "x")

"""Configurations of other frameworks: what has a counterpart is taken over, the rest is named, and nothing is run.

The texts here are written for these tests in the forms that the frameworks' own examples use.
"""

import json
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pearl_rl.cli.app import app
from pearl_rl.cli.importing import read_configuration, to_toml
from pearl_rl.errors import SettingsError
from pearl_rl.importing import areal, roll, slime, verl
from pearl_rl.importing.shell import UNKNOWN, training_command
from pearl_rl.importing.tree import devices, read_yaml
from pearl_rl.settings import load_settings

VERL = """\
#!/usr/bin/env bash
set -xeuo pipefail
NODES=${NODES:-2}   # of the trainer
n_rollout=4
gpus=8
train=$((gpus - n_rollout))
prompt=$((1024 * 2))
length=$(( (prompt + 6144) * 1 ))
extra=(
  actor_rollout_ref.actor.clip_ratio_low=0.2   # asymmetric
  actor_rollout_ref.actor.clip_ratio_high=0.28
)
python3 -X faulthandler -m verl.experimental.fully_async_policy.fully_async_main \\
    --config-name='fully_async_ppo_trainer.yaml' \\
    data.max_prompt_length=$prompt \\
    data.max_response_length="$((length - prompt))" \\
    actor_rollout_ref.model.path="${HOME}/models/big" \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    +actor_rollout_ref.rollout.engine_kwargs.sglang.disable_radix_cache=True \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.n=8 \\
    trainer.nnodes="${NODES}" trainer.n_gpus_per_node=$train \\
    rollout.nnodes=$NODES rollout.n_gpus_per_node=$n_rollout \\
    async_training.staleness_threshold=0.5 \\
    async_training.use_dynamic_resource_scheduling=True \\
    async_training.trigger_parameter_sync_step=4 \\
    trainer.logger='["console"]' \\
    "${extra[@]}" $@
"""

SLIME = """\
CKPT_ARGS=(
   --hf-checkpoint /models/big
)
ROLLOUT_ARGS=(
   --num-rollout 100
   --rollout-batch-size 8   # prompts
   --n-samples-per-prompt 8
   --rollout-max-context-len ${CONTEXT:-96000}
   --rollout-max-response-len 32768
   --use-dynamic-batch-size
   --max-tokens-per-gpu $((96000 / 8))
)
SGLANG_ARGS=( --rollout-num-gpus 16 --rollout-num-gpus-per-engine 2 --prefill-num-servers 3 )
ray job submit --address="http://127.0.0.1:8265" -- python3 train_async.py \\
   --actor-num-nodes 2 --actor-num-gpus-per-node 8 \\
   "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${SGLANG_ARGS[@]}" --lr 1e-6 --update-weights-interval 1 2>&1 | tee log
"""

ROLL = """\
pretrain: Org/Model
max_steps: 200
seed: 7
limit: 64
rollout_batch_size: 128
sequence_length: 8192
async_generation_ratio: 1
actor_train:
  training_args: {learning_rate: 1.0e-6, warmup_steps: 10}
  device_mapping: list(range(0,4))
actor_infer:
  generating_args: {max_new_tokens: "${limit}", temperature: 0.99}
  strategy_args: {strategy_config: {tensor_parallel_size: 2, gpu_memory_utilization: 0.8}}
  device_mapping: list(range(0,8))
train_env_manager: {group_size: 8, tags: [FrozenLake]}
"""

AREAL = """\
allocation_mode: sglang:d2p1t2+d2p1t1c2
seed: 1
gconfig: {n_samples: 8, max_new_tokens: 1024, max_tokens: 32767}
rollout: {max_head_offpolicyness: 2, consumer_batch_size: "${train_dataset.batch_size}"}
actor: {path: Org/Model, eps_clip: 0.4, optimizer: {lr: 1.7e-5}, ppo_n_minibatches: 2}
train_dataset: {batch_size: 32}
"""

CASES = {"verl": ("run.sh", VERL), "slime": ("run.sh", SLIME), "roll": ("job.yaml", ROLL), "areal": ("job.yaml", AREAL)}

EXPECTED = {
    "verl": {
        "cluster.training_gpus": 8,
        "cluster.reserved_rollout_gpus": 8,
        "cluster.gpus_per_worker": 2,
        "cluster.borrowing": "gated",
        "train.group_size": 8,
        "train.groups_per_step": 64,
        "train.minibatches": 4,
        "train.max_staleness_versions": 1,
        "train.clip_high": 0.28,
        "model.max_context_tokens": 8192,
        "rollout.max_new_tokens": 6144,
    },
    "slime": {
        "cluster.training_gpus": 16,
        "cluster.reserved_rollout_gpus": 16,
        "planner.policy": "static_pd",
        "planner.configuration": "3P5D",
        "model.max_context_tokens": 96000,
        "train.micro_batch_tokens": 12000,
        "rollout.batch_size": 64,
        "train.learning_rate": 1e-6,
        "run.steps": 100,
    },
    "roll": {
        "cluster.training_gpus": 4,
        "cluster.reserved_rollout_gpus": 4,
        "cluster.gpus_per_worker": 2,
        "cluster.borrowing": "gated",
        "train.groups_per_step": 16,
        "rollout.max_new_tokens": 64,
        "train.max_staleness_versions": 1,
        "train.warmup_updates": 10,
    },
    "areal": {
        "cluster.training_gpus": 4,
        "cluster.reserved_rollout_gpus": 4,
        "cluster.gpus_per_worker": 2,
        "cluster.borrowing": "off",
        "train.max_staleness_versions": 2,
        "train.minibatches": 2,
        "rollout.batch_size": 256,
    },
}


def given_file(folder: Path, framework: str) -> Path:
    name, text = CASES[framework]
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("framework", CASES)
def test_what_has_a_counterpart_is_taken_over(framework: str, tmp_path: Path) -> None:
    found = read_configuration(framework, given_file(tmp_path, framework), None)
    assert {key: found.settings.get(key) for key in EXPECTED[framework]} == EXPECTED[framework]


@pytest.mark.parametrize("framework", CASES)
def test_the_file_it_writes_is_a_valid_configuration_that_says_where_each_value_came_from(
    framework: str, tmp_path: Path
) -> None:
    source, target = given_file(tmp_path, framework), tmp_path / "job.toml"
    done = CliRunner().invoke(app, ["import", framework, str(source), "-o", str(target)])
    assert done.exit_code == 0
    resolved = load_settings(target)
    assert resolved.settings.cluster.training_gpus == EXPECTED[framework]["cluster.training_gpus"]
    for line in target.read_text().splitlines():
        assert not line or line[0] in "#[" or "  # " in line
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([source.name, "job.toml"])


@pytest.mark.parametrize("framework", CASES)
def test_no_call_is_given_up_while_workers_start_or_load(framework: str, tmp_path: Path) -> None:
    found = read_configuration(framework, given_file(tmp_path, framework), None).settings
    slowest_s = max(found[f"limits.executor.{name}"] for name in ("start_s", "load_s", "sync_s"))
    assert found["limits.rollout.no_worker_s"] > slowest_s


@pytest.mark.parametrize("framework", CASES)
def test_every_key_is_either_used_or_named_once(framework: str, tmp_path: Path) -> None:
    path = given_file(tmp_path, framework)
    done = CliRunner().invoke(app, ["import", framework, str(path), "--json"])
    body = json.loads(done.stdout)
    named = [line.split(": ")[0] for line in body["unsupported"]]
    assert len(named) == len(set(named))
    assert set(body["origins"]) == set(body["settings"])


def test_a_setting_of_elasticity_without_counterpart_says_why(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL.replace("async_training.staleness", "async_training.dynamic_schedule_deactivate_ratio=0.6 \\\n"
                                 "    async_training.staleness"))  # fmt: skip
    found = read_configuration("verl", path, None)
    assert "async_training.dynamic_schedule_deactivate_ratio: PEARL decides by its own gate, eq. (7)" in (
        found.unsupported
    )


def test_shared_gpus_get_one_worker_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SLIME.replace("--lr 1e-6", "--lr 1e-6 --colocate").replace("--prefill-num-servers 3", ""))
    found = read_configuration("slime", path, None)
    assert found.settings["cluster.borrowing"] == "gated"
    assert found.settings["cluster.reserved_rollout_gpus"] == 2
    assert any(line.startswith("(shared GPUs)") for line in found.unsupported)
    load_settings(None, [f"{key}={json.dumps(value)}" for key, value in found.settings.items()])


def test_disaggregation_of_verl_becomes_a_held_configuration() -> None:
    flat = verl.overrides(
        "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.disaggregation.enabled=True "
        "actor_rollout_ref.rollout.disaggregation.prefill_replicas=2 "
        "actor_rollout_ref.rollout.disaggregation.decode_replicas=3"
    )
    found = verl.read(flat, None)
    assert (found.settings["planner.policy"], found.settings["planner.configuration"]) == ("static_pd", "2P3D")


def test_the_model_is_a_folder_that_exists_or_the_one_given(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = given_file(tmp_path, "roll")
    assert "model.path" not in read_configuration("roll", path, None).settings
    model = str(tmp_path / "model")
    assert read_configuration("roll", path, model).settings["model.path"] == model
    path.write_text(ROLL.replace("Org/Model", model))
    assert read_configuration("roll", path, None).settings["model.path"] == model


@pytest.mark.parametrize(
    ("framework", "name", "text", "says"),
    [
        ("verl", "run.sh", "echo hello\n", "holds no command that starts reinforcement learning with verl"),
        ("roll", "job.sh", ROLL, "configured by YAML"),
        ("roll", "job.yaml", "a: [1", "not valid YAML"),
        ("roll", "job.yaml", "- 1\n", "holds no YAML mapping"),
        ("areal", "job.yaml", "gconfig: {temperature: -1}\n", "gives no valid settings: rollout.temperature"),
        ("verl", "job.yaml", "data: {train_batch_size: 8}\noptim: {lr: 1}\n", "no key of a job that rolls out"),
        (
            "verl",
            "run.sh",
            "python -m verl.trainer.main_generation data.n_samples=1 data.train_batch_size=8",
            "rolls out",
        ),
        ("slime", "run.sh", "python train.py --rollout-batch-size 8 --loss-type sft_loss", "rolls out with slime"),
        ("roll", "job.yaml", "sft_train: {a: 1}\nmax_steps: 5\n", "rolls out with ROLL (actor_train.*, actor_infer.*)"),
        ("areal", "job.yaml", "actor: {path: x}\ntrain_dataset: {batch_size: 8}\n", "rolls out with AReaL"),
        ("trl", "job.yaml", "a: 1\n", "unknown framework; known: verl, slime, roll, areal"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    framework: str, name: str, text: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    done = CliRunner().invoke(app, ["import", framework, str(tmp_path / name), "-o", str(tmp_path / "out.toml")])
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.toml").exists()


@pytest.mark.parametrize("entry", ["verl.trainer.main_ppo", "recipe.dapo.main_dapo"])
def test_the_job_is_read_and_not_what_a_script_does_with_the_weights_afterwards(entry: str) -> None:
    script = (
        f"python3 -m {entry} actor_rollout_ref.rollout.n=16\npython3 -m verl.model_merger merge --backend fsdp x=1\n"
    )
    assert verl.read(verl.overrides(script), None).settings["train.group_size"] == 16


def test_a_missing_file_and_one_that_is_no_text_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        read_configuration("verl", tmp_path / "none.sh", None)
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not UTF-8"):
        read_configuration("verl", tmp_path / "binary.sh", None)


def test_nothing_in_a_script_is_run(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    words = training_command(
        f"A=$(touch {witness})\npython train.py --x $A `touch {witness}` $((1+1))", re.compile("train")
    ).arguments
    assert words[:2] == ("--x", UNKNOWN)
    assert words[-1] == "2"
    assert not witness.exists()


def test_what_a_script_is_given_belongs_to_no_flag() -> None:
    flat = slime.flags('python train.py --lr 1e-6 --use-kl-loss --kl-loss-coef 0.01 "$@"')
    assert flat == {"(entry)": "train.py", "lr": "1e-6", "use-kl-loss": "true", "kl-loss-coef": "0.01"}


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ('X="a b"\npython train.py $X "$X" \'$X\'', ["a", "b", "a b", "$X"]),
        ('X="--a 1 \\\n --b=\\"2\\""\npython train.py $X', ["--a", "1", "--b=\"2\""]),
        ("A=(--x 1)\nA+=(--y 2)\npython train.py ${A[@]} --z", ["--x", "1", "--y", "2", "--z"]),
        ("A=(python -m)\nB=1 ${A[@]} train.py --x $B", ["--x", UNKNOWN]),
        ("python train.py --a 1 2>&1 | tee log --b", ["--a", "1"]),
        ("python train.py --a 1 > log.txt 2>&1 < /dev/null --b", ["--a", "1", "--b"]),
        ("python train.py --a 1 &>>log 2> errors &", ["--a", "1"]),
        ("cat <<EOF\npython train.py --a 1\nEOF\npython train.py --b $((2 * (3 + 1) % 5))", ["--b", "3"]),
        ("N=4\nif [ $N -gt 2 ]; then M=1; else M=2; fi\npython train.py $M", ["1"]),
        ("N=\nif [ -n \"$N\" ]; then M=1; elif [ 1 = 1 ]; then M=2; else M=3; fi\npython train.py $M", ["2"]),
        ("M=1\n[ a = b ] && M=2\n[ a != b ] || M=3\npython train.py $M", ["1"]),
        ("if [ a = a ] && { [ b = c ] || [ d = d ]; }; then M=1; fi\npython train.py $M", ["1"]),
        ("M=1\nif grep -q x /y; then M=2; fi\nfor i in 1 2; do K=$i; done\npython train.py $M $K", [UNKNOWN] * 2),
        ("M=5\nif grep -q x /y; then M=5; fi\npython train.py $M", ["5"]),
        ("A=(--x 1)\nif grep -q x /y; then\nA+=(--y=2 3)\nfi\npython train.py ${A[@]}",
         ["--x", "1", f"--y={UNKNOWN}", UNKNOWN]),
        ("B=fsdp\ncase $B in\n mega*) X=1 ;;\n fsdp|fsdp2) X=2 ;;\n *) X=3 ;;\nesac\npython train.py $X", ["2"]),
        ("D=${D:-$(python -c x)}\nN=8\nif [ \"$D\" = npu ]; then N=16; fi\npython train.py $N", ["8"]),
        ("D=$(x)\ncase $D in gpu) N=8 ;; npu) N=16 ;; esac\npython train.py $N", ["8"]),
        ("f() {\n N=3\n}\npython train.py ${N:-4}", [UNKNOWN]),
        (": ${N:=3}\npython train.py $N ${M:+x} ${N:+y}", ["3", "", "y"]),
        ("python train.py --a '{\"b\": \"$C\"}'", ["--a", '{"b": "$C"}']),
    ],
)  # fmt: skip
def test_a_script_is_read_as_its_shell_would(script: str, arguments: list[str]) -> None:
    found = [word for word in training_command(script, re.compile(r"^train\.py$")).arguments if word]
    assert found == [word for word in arguments if word]


def test_what_only_looks_like_a_number_in_a_script_makes_python_warn_of_nothing():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        words = training_command("python train.py $((1if 2)) $((8x))", re.compile(r"^train\.py$")).arguments
    assert [word for word in words if word] == [UNKNOWN] * 2
    assert not told


def test_a_value_that_grows_without_end_does_not() -> None:
    words = training_command("X=aaaaaaaa\n" + "X=$X$X\n" * 60 + "python train.py $X", re.compile("train")).arguments
    assert UNKNOWN in words[0]
    assert len(words[0]) < 100_000


def test_what_a_framework_would_take_itself_stands_where_a_key_is_missing() -> None:
    texts = {
        "verl": (verl.overrides, verl.read, "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=sglang"),
        "slime": (
            slime.flags,
            slime.read,
            "python train.py --rollout-batch-size 4 --n-samples-per-prompt 2 --colocate",
        ),
    }
    found = {name: read(flags(text), None) for name, (flags, read, text) in texts.items()}
    found["roll"] = roll.read({"rollout_batch_size": 64}, None)
    found["areal"] = areal.read({"gconfig.n_samples": 4, "train_dataset.batch_size": 2}, None)
    rates = {name: each.settings["train.learning_rate"] for name, each in found.items()}
    assert rates == {"verl": 1e-6, "slime": 1e-6, "roll": 5e-5, "areal": 1e-3}
    assert found["verl"].origins["train.learning_rate"] == "actor_rollout_ref.actor.optim.lr: verl's default"
    assert found["verl"].settings["train.groups_per_step"] == 1024
    # Rollout and training take turns in all of them.
    assert {each.settings["train.max_staleness_versions"] for each in found.values()} == {0}


@pytest.mark.parametrize(
    ("script", "versions"),
    [
        ("python -m verl.trainer.main_ppo a.b=1", 0),
        ("python -m verl.experimental.one_step_off_policy.main_ppo a.b=1", 1),
        ("python -m verl.trainer.main_ppo trainer.v1.trainer_mode=separate_async", 1),
        ("python -m verl.experimental.fully_async_policy.fully_async_main async_training.staleness_threshold=2.5", 3),
    ],
)
def test_staleness_follows_from_what_the_script_starts(script: str, versions: int) -> None:
    assert verl.read(verl.overrides(script), None).settings["train.max_staleness_versions"] == versions


def test_replicas_of_a_layout_are_as_many_as_there_is_room_for() -> None:
    rollout = "actor_rollout_ref.rollout"
    text = (
        f"python -m verl.trainer.main_ppo {rollout}.disaggregation.enabled=True {rollout}.nnodes=3 "
        f"{rollout}.disaggregation.decode_replicas=3 {rollout}.n_gpus_per_node=8 {rollout}.data_parallel_size=2 "
        f"{rollout}.tensor_model_parallel_size=1 {rollout}.gpu_memory_utilization=0.6 {rollout}.max_num_seqs=128"
    )
    found = verl.read(verl.overrides(text), None).settings
    assert (found["planner.configuration"], found["cluster.gpus_per_worker"]) == ("3P9D", 2)
    assert (found["engine.sglang.memory_fraction"], found["engine.max_running"]) == (0.6, 128)


def test_a_value_only_a_shell_knows_is_named_with_what_to_set_instead() -> None:
    found = slime.read(
        slime.flags("python train.py --lr $(cat lr) --rollout-batch-size 4 --n-samples-per-prompt 2"), None
    )
    assert "train.learning_rate" not in found.settings
    assert any(line.startswith("lr: ") and "set train.learning_rate by hand" in line for line in found.unsupported)


def test_half_of_what_belongs_together_is_named() -> None:
    group, response = areal.read({"gconfig.n_samples": 4}, None), roll.read({"response_length": 512}, None)
    assert "train.group_size" not in group.settings
    assert any("set train.groups_per_step and train.group_size by hand" in line for line in group.unsupported)
    assert "rollout.max_new_tokens" not in response.settings
    assert any("set model.max_context_tokens and rollout.max_new_tokens" in line for line in response.unsupported)


def test_a_value_beyond_ours_becomes_the_nearest_and_is_named() -> None:
    found = verl.read({"actor_rollout_ref.actor.clip_ratio_low": 10}, None)
    assert found.settings["train.clip_low"] == 1
    assert any("10 is beyond what train.clip_low may be; 1 is used" in line for line in found.unsupported)


@pytest.mark.parametrize("value", [4.5, 1e16, "1e300"])
def test_what_is_no_whole_number_is_named_and_not_cut(value: object) -> None:
    found = areal.read({"gconfig.n_samples": value, "train_dataset.batch_size": 8}, None)
    assert "train.group_size" not in found.settings
    assert any("is no whole number that PEARL can count to; set train.group_size" in line for line in found.unsupported)


def test_values_with_control_characters_reach_no_terminal() -> None:
    found = roll.read({"seed": "\x1b[2J\x07one", "\x1b[31m": 1}, None)
    assert all(line.isprintable() for line in found.unsupported)
    assert any("'?[2J?one' is not a number" in line for line in found.unsupported)


def test_fine_tuning_is_no_training_of_ours_and_another_configuration_is_named() -> None:
    assert verl.overrides("torchrun -m verl.trainer.sft_trainer data.train_batch_size=96") == {}
    found = verl.read(verl.overrides("python -m verl.trainer.main_ppo --config-name='my_agents' a.b=1"), None)
    assert any(line.startswith("(--config-name): 'my_agents' is another file") for line in found.unsupported)
    assert "rollout.max_turns" not in found.settings


def test_updates_of_a_step_are_counted_from_rows_and_ranks_of_roll() -> None:
    flat = read_yaml(ROLL, Path("x")) | {
        "actor_train.training_args.per_device_train_batch_size": 2,
        "actor_train.training_args.gradient_accumulation_steps": 8,
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": 2,
        "use_pg_clip_range": True,
        "pg_clip_high": 0.28,
        "use_kl_loss": True,
        "kl_loss_coef": 0.02,
        "init_kl_coef": 0.2,
    }
    found = roll.read(flat, None)
    # 128 trajectories over 2 × 8 rows on each of 4 / 2 ranks.
    assert found.settings["train.minibatches"] == 4
    assert (found.settings["train.clip_low"], found.settings["train.clip_high"]) == (0.2, 0.28)
    # The KL of the loss, not that of the reward.
    assert found.settings["train.kl_coefficient"] == 0.02


@pytest.mark.parametrize(
    ("normalization", "baseline"),
    [
        ({"method": "mean_std", "grouping": "traj_group_id"}, "mean_std"),
        ({"method": "mean", "grouping": "traj_group_id"}, "mean"),
        ({"method": "identity", "grouping": "batch"}, "none"),
        ({"method": "mean_std", "grouping": "batch"}, None),
        ({"method": "mean", "grouping": "tags"}, None),
        ({"method": "asym_clip", "grouping": "traj_group_id"}, None),
    ],
)
def test_a_baseline_of_roll_is_taken_over_where_it_is_a_group_s_own(
    normalization: dict[str, str], baseline: str | None
) -> None:
    flat = {"rollout_batch_size": 64, **{f"reward_normalization.{key}": value for key, value in normalization.items()}}
    found = roll.read(flat, None)
    assert found.settings.get("train.baseline") == baseline
    named = [line for line in found.unsupported if line.startswith("reward_normalization.")]
    assert len(named) == (baseline is None)


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("sglang:d4t8", (32, 8)),
        ("megatron:(attn:d1p12t4|ffn:d1p12e4)", (48, 48)),
        ("fsdp:d7p1t1", (7, 1)),
        ("d2p1t1c2", (4, 1)),
        ("", (0, 1)),
    ],
)
def test_a_backend_of_areal_is_a_number_of_gpus(backend: str, size: tuple[int, int]) -> None:
    assert areal.parallelism(backend) == size


def test_an_allocation_of_areal_says_what_serves_and_what_trains() -> None:
    assert areal.pools("sglang:d2t2+megatron:(attn:d1t2|ffn:d1e2)") == ("sglang:d2t2", "megatron:(attn:d1t2|ffn:d1e2)")
    assert areal.pools("d8") == ("", "d8")


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        ("list(range(0,3))", [0, 1, 2]),
        ("list(range(2))", [0, 1]),
        ("list(range(0,2)) + list(range(4,5))", [0, 1, 4]),
        ([3, 4], [3, 4]),
        ("__import__('os')", None),
        (None, None),
        ("list(range(0,99999999999))", None),
    ],
)
def test_device_mappings_are_read_not_evaluated(value: object, gpus: list[int] | None) -> None:
    assert devices(value) == gpus


def test_selections_take_what_is_there_or_their_default(tmp_path: Path) -> None:
    text = (
        "a: {b: 7}\nc: ${oc.select:a.b,1}\nd: ${oc.select:a.x, 3}\ne: ${oc.select:a.x,null}\nf: ${oc.env:HOME,/h}\n"
        "g: ${oc.env:HOME}\n"
    )
    flat = read_yaml(text, tmp_path)
    assert (flat["c"], flat["d"], flat["e"], flat["f"], flat["g"]) == (7, "3", None, "/h", "${oc.env:HOME}")


def test_references_are_followed_and_circles_end(tmp_path: Path) -> None:
    doubled = "".join(f"k{n}: '${{k{n + 1}}}${{k{n + 1}}}'\n" for n in range(60)) + "k60: x\n"
    assert read_yaml(doubled, tmp_path)["k59"] == "xx"
    shared = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 60))
    with pytest.raises(SettingsError, match="comes to more than 100,000 keys"):
        read_yaml(shared, tmp_path)
    assert devices("+".join(["list(range(0, 1000000))"] * 5_000)) is None
    flat = read_yaml("a: ${b}\nb: ${a}\nc: ${d.e}x\nd: {e: 5}\nf: ${d.e}\n", tmp_path)
    assert flat["c"] == "5x"
    assert flat["f"] == 5
    assert "${" in flat["a"]


_WORDS = st.sampled_from(
    ["$", "${", "}", "$((", "))", "(", ")", "\\", "\n", '"', "'", "#", "A=", "A", "+", "1", " ", "X=(", "X+=(", "if ",
     "; then", "elif ", "else ", " fi", "case A in", "*)", ";;", " esac", "[ ", " ]", "=", "&&", "||", "{ ", "; }",
     "<<E", "E\n", "`", "for ", "do ", "done"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(_WORDS, max_size=30).map("".join))
def test_any_script_is_read_without_an_error(text: str) -> None:
    slime.flags(text + "\npython train.py --lr 1")
    verl.overrides(text + "\npython -m verl.trainer.main_ppo a.b=1")


_VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["rollout_batch_size", "pg_clip", "max_steps", "lr", "gconfig.n_samples"]), _VALUES)
)
@example({"rollout_batch_size": "\n"})
def test_any_values_are_taken_or_named(values: dict[str, object]) -> None:
    for read in (roll.read, areal.read, slime.read, verl.read):
        found = read(dict(values), None)
        assert all("\n" not in line for line in found.unsupported)
        to_toml(found, Path("x"))

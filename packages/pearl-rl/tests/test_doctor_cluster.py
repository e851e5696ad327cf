"""The doctor of a cluster: what settings need against what nodes answered, without a cluster."""

import sys
from dataclasses import replace
from importlib.metadata import version

import pytest

from pearl_executor.runtimes.ray import survey
from pearl_executor.runtimes.ray.survey import NodeFacts, Questions, look
from pearl_rl.cli import doctor_cluster
from pearl_rl.cli.doctor_cluster import compare
from pearl_rl.settings import load_settings

SETTINGS = load_settings(
    None,
    [
        "cluster.runtime=ray",
        "cluster.training_gpus=16",
        "cluster.reserved_rollout_gpus=4",
        "cluster.max_preemptible_gpus=12",
        "cluster.gpus_per_worker=2",
        "cluster.ray.training_labels=pearl.zone=training",
        "cluster.ray.reserved_labels=pearl.zone=reserved",
        "cluster.ray.preemptible_labels=pearl.zone=elastic",
    ],
).settings


def node(zone, gpus, **changes):
    facts = NodeFacts(
        id=zone * 8,
        host=f"10.0.0.{gpus}",
        labels={"pearl.zone": zone},
        gpus=gpus,
        python="3.11.7",
        ray="2.60.0",
        pearl=version("pearl-executor"),
    )
    return replace(facts, **changes)


@pytest.fixture(autouse=True)
def this_ray(monkeypatch):
    monkeypatch.setattr(doctor_cluster, "version", lambda name: "2.60.0" if name == "ray" else version(name))


def found(*nodes, settings=SETTINGS):
    return {finding.name: finding for finding in compare(settings, nodes, "/runs/.marker")}


def test_a_cluster_that_has_all_is_fit_also_without_its_preemptible_nodes():
    findings = found(node("training", 8), node("training", 8), node("reserved", 4))
    assert all(finding.ok for finding in findings.values() if finding.needed)
    assert findings["preemptible GPUs"].ok is False
    assert findings["training GPUs"].detail == "16 GPUs in 2s on 2 of nodes labelled pearl.zone=training; 16 wanted"
    assert "node 10.0.0.8 (training)" in findings


def test_gpus_count_only_where_whole_workers_fit_on_a_node():
    findings = found(node("training", 15), node("training", 1), node("reserved", 4))
    assert not findings["training GPUs"].ok
    assert findings["training GPUs"].detail.startswith("14 GPUs in 2s on 2")
    assert "--labels pearl.zone=training" in findings["training GPUs"].remedy


@pytest.mark.parametrize(
    ("changes", "words", "remedy"),
    [
        ({"ray": "2.50.0"}, "another Ray than here (2.60.0)", "same version everywhere"),
        ({"pearl": "0.0.1"}, "another pearl-executor than here (0.0.1)", "uv sync --group ray"),
        ({"reaches_driver": False}, "cannot connect to the driver", "open the network"),
        ({"missing": ("/runs/.marker",)}, "does not share run.dir = runs", "file system that all training nodes share"),
        (
            {"error": "No module named 'pearl_executor'"},
            "does not answer: No module",
            "is the project installed there?",
        ),
    ],
)
def test_what_is_wrong_with_a_node_is_said_with_what_to_do(changes, words, remedy):
    findings = found(node("training", 8, **changes))
    finding = findings["node 10.0.0.8 (training)"]
    assert not finding.ok
    assert finding.needed
    assert words in finding.detail
    assert remedy in finding.remedy


def test_preemptible_nodes_need_no_shared_run_folder():
    assert found(node("elastic", 2, missing=("/runs/.marker",)))["node 10.0.0.2 (elastic)"].ok


def test_sglang_is_looked_for_in_its_interpreter():
    settings = SETTINGS.model_copy(update={"engine": SETTINGS.engine.model_copy(update={"kind": "sglang"})})
    lacking = node("elastic", 2, sglang="/opt/sglang/bin/python has no SGLang")
    finding = found(lacking, settings=settings)["node 10.0.0.2 (elastic)"]
    assert "engine.sglang.interpreter: /opt/sglang/bin/python has no SGLang" in finding.detail
    assert found(replace(lacking, sglang="0.5.23"), settings=settings)["node 10.0.0.2 (elastic)"].ok
    other = found(replace(lacking, sglang="0.5.8"), settings=settings)["node 10.0.0.2 (elastic)"]
    assert "SGLang 0.5.8, not 0.5.23" in other.detail
    assert "uv pip install sglang==0.5.23" in other.remedy
    unable = replace(lacking, sglang="0.5.23", transfer="ImportError: libibverbs.so.1: cannot open shared object file")
    finding = found(unable, settings=settings)["node 10.0.0.2 (elastic)"]
    assert "cannot hand KV over: ImportError: libibverbs.so.1" in finding.detail
    assert "mooncake-transfer-engine" in finding.remedy


def test_a_node_answers_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("pearl_executor.runtimes.ray.survey.metadata.version", lambda name: "1")
    questions = Questions(
        paths=(str(tmp_path), str(tmp_path / "none")), interpreter=("no-such-python",), listener=("127.0.0.1", 1)
    )
    answer = look(questions)
    assert answer["missing"] == (str(tmp_path / "none"),)
    assert answer["sglang"] == "no-such-python cannot be run (FileNotFoundError)"
    assert answer["transfer"] == ""
    without = look(Questions(interpreter=(sys.executable,)))
    assert (without["sglang"], without["transfer"]) == (f"{sys.executable} has no SGLang", "")
    stand_in = look(Questions(interpreter=(sys.executable, "-m", "pearl_executor.testing.sglang")))
    assert (stand_in["sglang"], stand_in["transfer"]) == ("0.5.23", "")
    assert answer["reaches_driver"] is False


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("echo ImportError: libibverbs.so.1 >&2; exit 1", "ImportError: libibverbs.so.1"),
        ("exec sleep 60", "import mooncake.engine does not end (TimeoutExpired)"),
        ("exit 1", "it cannot be imported"),
    ],
)
def test_a_hand_over_that_cannot_be_loaded_or_never_is_is_told(tmp_path, monkeypatch, does, says):
    monkeypatch.setattr("pearl_executor.runtimes.ray.survey.metadata.version", lambda name: "1")
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\ncase "$2" in *mooncake*) {does};; *) echo 0.5.23;; esac\n')
    interpreter.chmod(0o755)
    if "sleep" in does:
        ask = survey._run
        monkeypatch.setattr(
            survey, "_run", lambda command, code: ask(command, code, 0.5 if "mooncake" in code else 60.0)
        )
    answer = look(Questions(interpreter=(str(interpreter),)))
    assert (answer["sglang"], answer["transfer"]) == ("0.5.23", says)

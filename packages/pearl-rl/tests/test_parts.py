"""What a run is built from says what its settings say."""

import asyncio

import pytest

from pearl_executor.availability import ControlFileSource
from pearl_executor.virtual_time import run_virtual
from pearl_rl import parts
from pearl_rl.errors import SettingsError
from pearl_rl.settings import Settings, load_settings
from pearl_rl.training.options import ComputeDtype, RefActor
from pearl_state.events import GpusOffered
from pearl_state.roles import Tenure


def chosen(*overrides: str) -> Settings:
    return load_settings(None, overrides).settings


def test_training_computes_on_the_device_of_the_engines_and_in_the_model_s_format() -> None:
    usual = parts.trainer_options(chosen())
    assert (usual.device, usual.dtype) == ("cpu", ComputeDtype.FLOAT32)
    options = parts.trainer_options(chosen("engine.device=cuda", "model.dtype=bfloat16", "run.seed=7"))
    assert (options.device, options.dtype, options.seed) == ("cuda", ComputeDtype.BFLOAT16, 7)


def test_the_reference_works_where_train_ref_actor_says() -> None:
    usual = parts.trainer_options(chosen())
    assert (usual.ref_actor, usual.reference_rank) == (RefActor.INLINE, False)
    together = parts.trainer_options(chosen("train.kl_coefficient=0.1", "train.ref_actor=colocated"))
    assert (together.ref_actor, together.reference_rank) == (RefActor.COLOCATED, False)
    apart = parts.trainer_options(chosen("train.kl_coefficient=0.1", "train.ref_actor=decoupled"))
    assert (apart.ref_actor, apart.reference_rank) == (RefActor.DECOUPLED, True)
    begins = parts.trainer_options(chosen("train.kl_coefficient=0.1", "train.ref_actor=auto"))
    assert (begins.ref_actor, begins.reference_rank) == (RefActor.COLOCATED, False)


def test_an_update_that_may_form_its_ranks_anew_has_the_time_for_it() -> None:
    kept, formed = (
        parts.pipeline_settings(chosen("train.kl_coefficient=0.1", f"train.ref_actor={mode}", "cluster.max_restarts=1"))
        for mode in ("colocated", "auto")
    )
    bounds = chosen().limits.training
    assert formed.update_s - kept.update_s == 2 * (bounds.start_s + 2 * bounds.checkpoint_s)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("train.ref_actor=colocated",), r"train.kl_coefficient=0 keeps none; use train.kl_coefficient=0.01"),
        (("train.ref_actor=auto",), r'train.ref_actor="auto" says where a reference works, and train.kl_coefficient=0'),
        (
            ("train.ref_actor=decoupled", "train.kl_coefficient=0.1", "cluster.training_gpus=1"),
            r"needs another one for the actor; use cluster.training_gpus=2 or more",
        ),
    ],
)
def test_a_place_for_the_reference_that_cannot_be_is_refused_in_one_line(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        chosen(*overrides)


def offers(settings: Settings) -> dict[Tenure, set[int]]:
    async def follow() -> dict[Tenure, set[int]]:
        found: dict[Tenure, set[int]] = {}
        async with asyncio.timeout(1.0):
            async for event in parts.availability(settings).events():
                if isinstance(event, GpusOffered):
                    found.setdefault(event.tenure, set()).update(event.gpus)
        return found

    return run_virtual(follow())


def test_gpus_are_numbered_training_first_then_reserved_then_preemptible_ones() -> None:
    sizes = ("cluster.training_gpus=3", "cluster.reserved_rollout_gpus=2", "cluster.max_preemptible_gpus=4")
    settings = chosen(*sizes, "availability.source=fixed")
    assert list(parts.preemptible_gpus(settings)) == [5, 6, 7, 8]
    assert offers(settings) == {Tenure.RESERVED: {3, 4}, Tenure.PREEMPTIBLE: {5, 6, 7, 8}}
    none = chosen(*sizes[:2], "cluster.max_preemptible_gpus=0", "availability.source=fixed")
    assert offers(none) == {Tenure.RESERVED: {3, 4}}


def test_people_stand_in_for_a_control_file() -> None:
    settings = chosen(
        "cluster.reserved_rollout_gpus=0", "availability.source=control", "control.http=true", "control.http_port=0"
    )
    people = parts.people_gpus(settings)
    assert people is not None
    assert parts.availability(settings, people=people) is people
    by_file = chosen("cluster.reserved_rollout_gpus=0", "availability.source=control", "availability.control_file=x")
    assert parts.people_gpus(by_file) is None
    assert isinstance(parts.availability(by_file), ControlFileSource)

"""Where the reference works: what each mode needs. That all give the same gradients is in test_trainer.py."""

import pytest

from pearl_rl.training.options import LossOptions, OptionError, RefActor, TrainerOptions
from pearl_rl.training.shards import join_shards, split_shards


def test_modes_that_lack_what_they_need_are_refused() -> None:
    with pytest.raises(OptionError, match="needs reference_rank"):
        TrainerOptions(ref_actor=RefActor.DECOUPLED, loss=LossOptions(kl_coefficient=0.1))
    with pytest.raises(OptionError, match="kl_coefficient"):
        TrainerOptions(reference_rank=True)


def test_options_travel_to_the_ranks_whole() -> None:
    options = TrainerOptions(
        ref_actor=RefActor.COLOCATED, reference_rank=True, loss=LossOptions(kl_coefficient=0.1, truncation=3.0)
    )
    assert TrainerOptions.from_json(options.to_json()) == options


def test_a_reference_rank_gets_every_actor_s_shard_in_one_message() -> None:
    shards = [({"steps": [[[3, 2]]]}, b"abcde"), ({"steps": [[[]]]}, b""), ({"steps": [[[1]]]}, b"xyz")]
    head, body = join_shards(shards)
    assert split_shards(head, body) == shards

"""What tests and measurements of the trainer train: a model of a few hundred weights, and random trajectories."""

import random

from pearl_rl.training.batch import TrainBatch
from pearl_rl.training.options import LossOptions, OptimizerOptions, TrainerOptions
from pearl_rl.training.tiny_model import TinyShape
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn, WeightSpan

SHAPE = TinyShape(
    vocabulary_size=41, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24, stop_token_id=3
)
OPTIONS = TrainerOptions(
    loss=LossOptions(truncation=2.0, kl_coefficient=0.05, entropy_coefficient=0.01),
    # A large epsilon: where a gradient is all rounding error, AdamW would otherwise turn its sign into a whole step.
    optimizer=OptimizerOptions(learning_rate=3e-3, epsilon=1e-4, weight_decay=0.01, max_gradient_norm=0.5),
    minibatches=2,
    micro_batch_tokens=120,
    seed=5,
)
"""Every term of the loss takes part, and an update is of several passes."""


def random_batch(seed: int, version: int = 0, groups: int = 3, size: int = 3) -> TrainBatch:
    """`groups` × `size` trajectories of one to three turns each, the same for the same seed."""
    draw = random.Random(seed)
    return TrainBatch.build([_trajectory(draw, n, n // size, version) for n in range(groups * size)], version)


def _trajectory(draw: random.Random, number: int, group: int, version: int) -> Trajectory:
    turns = []
    for _ in range(draw.randint(1, 3)):
        response = [draw.randrange(SHAPE.vocabulary_size) for _ in range(draw.randint(1, 6))]
        logprobs = [-draw.uniform(2.0, 5.0) for _ in response]
        prompt = [draw.randrange(SHAPE.vocabulary_size) for _ in range(draw.randint(2, 9))]
        turns.append(
            Turn(prompt=prompt, response=response, logprobs=logprobs, spans=(WeightSpan(version, len(response)),))
        )
    return Trajectory(
        id=TrajectoryId(f"t{number:08d}"),
        group=GroupId(f"g{group}"),
        task="task",
        turns=tuple(turns),
        reward=draw.random(),
        dispatch_version=version,
        started_s=0.0,
        finished_s=1.0,
    )

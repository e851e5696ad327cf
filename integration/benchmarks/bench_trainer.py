"""What the FSDP2 trainer guarantees, in figures: `python integration/benchmarks/bench_trainer.py`; half a minute.

The same random batches on two ranks and on one: how far their weights are apart after `--steps` updates; how far a run
that goes on from a checkpoint of two ranks on one is from the uninterrupted one; which part of its measured memory a
trainer frees when it lends its GPUs, and whether it goes on bit by bit as if it had not. Nothing is judged here:
`packages/pearl-rl/tests/test_trainer.py` demands 1e-5, 95 % and equality.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from pearl_executor.runtimes.local.processes import ForkServer
from pearl_rl.training.build import build_in_child
from pearl_rl.training.process import PRELOAD, LocalTrainer
from pearl_rl.training.testing import OPTIONS, SHAPE, random_batch


def weights(snapshot: Path) -> Mapping[str, torch.Tensor]:
    """Of a snapshot; read at once, since a trainer keeps only its newest ones."""
    return load_file(snapshot / "model.safetensors")


def apart(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Largest absolute difference of any weight."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


async def measure(folder: Path, steps: int) -> dict[str, float | bool | int]:
    """All figures."""
    forks = ForkServer(folder / "logs", preload=PRELOAD)
    await forks.open()
    trainers: list[LocalTrainer] = []
    try:
        await build_in_child(forks, folder / "model", SHAPE, seed=1)

        def trainer(name: str, ranks: int) -> LocalTrainer:
            trainers.append(LocalTrainer(forks, folder / "model", folder / name, OPTIONS, ranks=ranks))
            return trainers[-1]

        two, one, lending = trainer("two", 2), trainer("one", 1), trainer("lending", 2)
        for each in (two, one, lending):
            await each.start()
        for step in range(steps):
            if step == steps // 2:
                await two.save_checkpoint(folder / "checkpoint")
                released = await lending.release()
                await lending.resume()
            batch = random_batch(step, step)
            on_two, on_one, lent = [await each.update(batch) for each in (two, one, lending)]
        uninterrupted, alone = weights(on_two.snapshot_path), weights(on_one.snapshot_path)
        await one.load_checkpoint(folder / "checkpoint")
        for step in range(steps // 2, steps):
            resumed = await one.update(random_batch(step, step))
        return {
            "steps": steps,
            "optimizer_steps": on_two.metrics.optimizer_steps,
            "two_ranks_from_one": apart(uninterrupted, alone),
            "resumed_on_one_from_uninterrupted": apart(uninterrupted, weights(resumed.snapshot_path)),
            "held_bytes": released.before_bytes,
            "freed": 1.0 - released.after_bytes / released.before_bytes,
            "same_bits_after_lending": lent.checksum == on_two.checksum,
        }
    finally:
        for each in trainers:
            await each.kill()
        await forks.aclose()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="updates, at least 2 (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2")
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), arguments.steps))
    json.dump(figures, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

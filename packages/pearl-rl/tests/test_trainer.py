"""Real FSDP2 ranks in real processes: they compute what plain torch does, and nothing outlives a failure."""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pearl_executor.runtimes.local.processes import ForkServer  # noqa: E402
from pearl_planner.ref_actor import RefActorMode  # noqa: E402
from pearl_rl.training.build import build_in_child  # noqa: E402
from pearl_rl.training.checkpoint import CheckpointError  # noqa: E402
from pearl_rl.training.options import LossOptions, OptimizerOptions, RefActor, TrainerOptions  # noqa: E402
from pearl_rl.training.process import PRELOAD, LocalTrainer, TrainerLimits  # noqa: E402
from pearl_rl.training.rank_group import TrainerError, TrainerLostError  # noqa: E402
from pearl_rl.training.ref_actor_auto import AutoRefActor  # noqa: E402
from pearl_rl.training.testing import OPTIONS, SHAPE, random_batch  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def forks(loop, tmp_path_factory):
    server = ForkServer(tmp_path_factory.mktemp("logs"), preload=PRELOAD)
    loop.run(server.open())
    yield server
    loop.run(server.aclose())


@pytest.fixture(scope="module")
def model(loop, forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    loop.run(build_in_child(forks, folder, SHAPE, seed=1))
    return folder


@pytest.fixture
def trainer(loop, forks, model, tmp_path):
    made = []

    def make(name="trainer", ranks=2, options=OPTIONS, kind=LocalTrainer, **rest):
        made.append(kind(forks, model, tmp_path / name, options, ranks=ranks, **rest))
        return made[-1]

    yield make
    for one in made:
        loop.run(one.kill())


def weights(folder):
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def plain_torch_update(model_path, train_batch):
    """The same update on one process without FSDP, row by row, written independently of the trainer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    o = OPTIONS.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), o.learning_rate, (o.beta1, o.beta2), o.epsilon, o.weight_decay)
    groups = list(dict.fromkeys(sequence.group for sequence in train_batch.sequences))
    for part in range(2):
        rows = [s for s in train_batch.sequences if s.group in groups[part::2]]
        total = sum(sum(row.mask) for row in rows)
        for row in rows:
            tokens = torch.tensor([row.tokens])
            logprobs = torch.log_softmax(model(tokens).logits[0, :-1], -1)
            with torch.no_grad():
                initial = torch.log_softmax(reference(tokens).logits[0, :-1], -1)
            for place, (token, generated) in enumerate(zip(row.tokens[1:], row.mask[1:], strict=True)):
                if not generated:
                    continue
                new = logprobs[place, token]
                weight = min(2.0, float(torch.exp(new.detach() - row.logprobs[place + 1])))
                gap = initial[place, token] - new
                entropy = -(logprobs[place].exp() * logprobs[place]).sum()
                loss = -weight * row.advantage * new + 0.05 * (torch.exp(gap) - gap - 1) - 0.01 * entropy
                (loss / total).backward(retain_graph=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_two_ranks_make_the_update_that_plain_torch_makes_and_its_snapshot_loads_in_transformers(loop, trainer, model):
    from transformers import AutoModelForCausalLM

    two = trainer()
    first = loop.run(two.start())
    assert first.version == 0
    assert difference(weights(first.uri), weights(model)) == 0.0
    result = loop.run(two.update(random_batch(7)))
    expected = plain_torch_update(model, random_batch(7))
    assert difference(weights(result.snapshot_path), expected) < 1e-5
    assert difference(weights(result.snapshot_path), weights(model)) > 1e-3
    loaded = AutoModelForCausalLM.from_pretrained(result.snapshot_path, dtype=torch.float32)
    assert difference(dict(loaded.named_parameters()), weights(result.snapshot_path)) == 0.0

    from pearl_executor.engines.torch.weights import weights_checksum

    assert result.checksum == weights_checksum(weights(result.snapshot_path)) != first.checksum
    assert result.snapshot.bytes == (result.snapshot_path / "model.safetensors").stat().st_size
    assert result.version == two.version == 1
    assert result.metrics.optimizer_steps == 2
    assert result.metrics.response_tokens == random_batch(7).response_tokens
    assert result.metrics.skipped_steps == 0


def test_a_checkpoint_continues_as_if_nothing_had_been_with_any_number_of_ranks(loop, trainer, tmp_path):
    whole = trainer("whole")
    loop.run(whole.start())
    loop.run(whole.update(random_batch(1)))
    loop.run(whole.save_checkpoint(tmp_path / "checkpoint"))
    expected = loop.run(whole.update(random_batch(2)))
    assert sorted(p.suffix for p in (tmp_path / "checkpoint").rglob("*") if p.is_file()) == [
        ".json",
        *[".safetensors"] * 4,
    ]
    for ranks in (2, 1):
        resumed = trainer(f"resumed{ranks}", ranks=ranks)
        loop.run(resumed.start())
        loop.run(resumed.load_checkpoint(tmp_path / "checkpoint"))
        result = loop.run(resumed.update(random_batch(2)))
        tolerance = 0.0 if ranks == 2 else 1e-5
        assert difference(weights(result.snapshot_path), weights(expected.snapshot_path)) <= tolerance
        assert result.metrics.optimizer_steps == expected.metrics.optimizer_steps == 4


def test_twenty_steps_of_two_ranks_equal_one_ranks_and_a_checkpoint_of_two_resumes_on_one(loop, trainer, tmp_path):
    two, one = trainer("two", threads=1), trainer("one", ranks=1)
    for either in (two, one):
        loop.run(either.start())
    saving = None
    for step in range(20):
        if step == 10:
            saving = loop.run(two.begin_checkpoint(tmp_path / "tenth"))
        results = [loop.run(either.update(random_batch(step, version=step))) for either in (two, one)]
    assert [result.metrics.optimizer_steps for result in results] == [40, 40]
    uninterrupted, alone = (weights(result.snapshot_path) for result in results)
    assert difference(uninterrupted, alone) < 1e-5
    assert saving is not None
    loop.run(asyncio.wait_for(saving, 30))
    # The weights that are trained on since do not reach the checkpoint, which was written beside it.
    first = loop.run(one.load_checkpoint(tmp_path / "tenth"))
    assert first > 20
    for step in range(10, 20):
        result = loop.run(one.update(random_batch(step, version=step)))
    assert difference(weights(result.snapshot_path), uninterrupted) < 1e-5
    assert result.metrics.optimizer_steps == 40


async def disturbed_checkpoint(one: LocalTrainer, folder: Path, why: str) -> None:
    """A checkpoint of which rank 0 says that it could not write its part."""
    saving = await one.begin_checkpoint(folder / "checkpoint")
    written = folder / ".partial-checkpoint-1" / "written"
    written.mkdir(parents=True, exist_ok=True)
    (written / "rank00000").write_text(why)
    await saving


def test_a_checkpoint_that_a_rank_cannot_write_is_none_and_names_the_rank(loop, trainer, tmp_path):
    one = trainer(ranks=1)
    loop.run(one.start())

    with pytest.raises(TrainerError, match=r"rank 0 of 1 could not write its shards: OSError: .* No space left"):
        loop.run(disturbed_checkpoint(one, tmp_path, "OSError: [Errno 28] No space left on device"))
    assert not (tmp_path / "checkpoint").exists()
    loop.run(one.save_checkpoint(tmp_path / "checkpoint"))
    assert (tmp_path / "checkpoint" / "state.json").is_file()
    # Also what the rank wrote on after its report.
    assert not list(tmp_path.glob(".partial*"))


def test_what_a_late_rank_wrote_is_removed_with_the_next_checkpoint_that_begins_whatever_failed_between(
    loop, trainer, tmp_path
):
    one = trainer(ranks=1)
    loop.run(one.start())

    with pytest.raises(TrainerError, match="a disk that hesitates"):
        loop.run(disturbed_checkpoint(one, tmp_path, "OSError: a disk that hesitates"))
    partial = tmp_path / ".partial-checkpoint-1"
    partial.mkdir(exist_ok=True)
    (partial / "shard-00001.safetensors").write_bytes(b"late")
    os.kill(one.pids[0], signal.SIGKILL)
    with pytest.raises(TrainerLostError):
        loop.run(one.save_checkpoint(tmp_path / "checkpoint"))
    loop.run(one.recover())
    loop.run(one.save_checkpoint(tmp_path / "checkpoint"))
    assert not list(tmp_path.glob(".partial*"))


def test_lost_ranks_begin_anew_on_the_newest_weights_with_the_moments_of_the_checkpoint(loop, trainer, tmp_path):
    steady, shaken = trainer("steady"), trainer("shaken")
    for one in (steady, shaken):
        loop.run(one.start())
        loop.run(one.update(random_batch(1)))
    loop.run(shaken.save_checkpoint(tmp_path / "checkpoint"))
    os.kill(shaken.pids[1], signal.SIGKILL)
    with pytest.raises(TrainerLostError, match="rank 1 of 2 is gone"):
        loop.run(shaken.update(random_batch(2)))
    # What was published stays what is newest, whole and loadable.
    assert shaken.version == 1
    before = weights(shaken.newest.uri)
    loop.run(shaken.recover(tmp_path / "checkpoint"))
    after = [loop.run(one.update(random_batch(2))) for one in (steady, shaken)]
    assert [result.version for result in after] == [2, 2]
    assert after[0].metrics.optimizer_steps == after[1].metrics.optimizer_steps
    assert difference(weights(after[0].snapshot_path), weights(after[1].snapshot_path)) < 1e-5
    assert difference(weights(after[1].snapshot_path), before) > 1e-4


class OverTcp:
    """Children that reach each other as those of a cluster do."""

    peer_key = ""

    def __init__(self, forks):
        self.spawn, self.kill = forks.spawn, forks.kill

    def peer_address(self, name):
        return "tcp://127.0.0.1:0"


def test_ranks_that_may_be_on_several_machines_meet_over_tcp(loop, forks, model, tmp_path):
    spread = LocalTrainer(OverTcp(forks), model, tmp_path / "spread", OPTIONS)
    first = loop.run(spread.start())
    loop.run(spread.stop())
    assert difference(weights(first.uri), weights(model)) == 0.0
    assert not (tmp_path / "spread" / "rendezvous").exists()


def test_versions_never_go_back_over_a_resume(loop, trainer, tmp_path):
    """radixark/miles#2835: a checkpoint of version 55 is served as 56, and the next update publishes 57."""
    one = trainer(ranks=1)
    loop.run(one.start())
    loop.run(one.save_checkpoint(tmp_path / "checkpoint"))
    state = tmp_path / "checkpoint" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "version": 55}))
    assert loop.run(one.load_checkpoint(tmp_path / "checkpoint")) == 56
    assert one.newest.version == 56
    assert loop.run(one.update(random_batch(3, version=56))).version == 57
    assert loop.run(one.start()).version == 58


def test_a_trainer_goes_on_from_the_newest_weights_and_keeps_their_version(loop, trainer, tmp_path):
    """Nothing is trained twice: with a checkpoint of these weights all is as before, with an older one its moments."""
    steady, store = trainer("steady"), tmp_path / "store"
    loop.run(steady.start())
    for step in range(3):
        if step < 2:
            loop.run(steady.save_checkpoint(tmp_path / f"after-{step}"))
        result = loop.run(steady.update(random_batch(step, version=step)))
        if step == 1:
            loop.run(steady.save_checkpoint(tmp_path / "after-2"))
            shutil.copytree(result.snapshot_path, store)
            second = dataclasses.replace(steady.newest, uri=str(store))
    exact, older = trainer("exact"), trainer("older")
    loop.run(exact.go_on(second, tmp_path / "after-2"))
    assert (exact.version, exact.newest.uri) == (2, str(store))
    same = loop.run(exact.update(random_batch(2, version=2)))
    assert same.version == 3
    assert difference(weights(same.snapshot_path), weights(result.snapshot_path)) < 1e-5
    loop.run(older.go_on(second, tmp_path / "after-1"))
    near = loop.run(older.update(random_batch(2, version=2)))
    assert near.version == 3
    assert near.metrics.optimizer_steps < same.metrics.optimizer_steps
    assert difference(weights(near.snapshot_path), weights(result.snapshot_path)) > 1e-5
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        loop.run(trainer("none").go_on(second, store))


def test_a_folder_that_is_no_checkpoint_is_refused_before_any_rank_is_touched(loop, trainer, tmp_path):
    one = trainer(ranks=1)
    loop.run(one.start())
    loop.run(one.save_checkpoint(tmp_path / "checkpoint"))
    (tmp_path / "partial").mkdir()
    with pytest.raises(CheckpointError, match=r"partial is no complete checkpoint: it has no state.json"):
        loop.run(one.load_checkpoint(tmp_path / "partial"))
    for text, message in [
        ("{", "not readable"),
        ('{"format": 2}', "another format"),
        ('{"format": 1}', "not readable"),
    ]:
        (tmp_path / "partial" / "state.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            loop.run(one.load_checkpoint(tmp_path / "partial"))
    assert loop.run(one.load_checkpoint(tmp_path / "checkpoint")) == 1
    assert not list(tmp_path.glob(".partial*"))


def test_release_frees_all_tensors_and_training_goes_on_identically(loop, trainer):
    steady, toggled = trainer("steady"), trainer("toggled")
    for one in (steady, toggled):
        loop.run(one.start())
        loop.run(one.update(random_batch(1)))
    released = loop.run(toggled.release())
    # Parameters and reference in float32, two moments each; every rank also holds the small tensors that all have.
    parameters = sum(tensor.numel() for tensor in weights(toggled.newest.uri).values())
    assert released.before_bytes >= 4 * parameters * 4
    assert released.after_bytes < 0.02 * released.before_bytes
    for refused in (toggled.update(random_batch(2)), toggled.release(), toggled.save_checkpoint(Path("nowhere"))):
        with pytest.raises(TrainerError, match="the training memory is released; resume it first"):
            loop.run(refused)
    resumed = loop.run(toggled.resume())
    assert (resumed.before_bytes, resumed.after_bytes) == (released.after_bytes, released.before_bytes)
    with pytest.raises(TrainerError, match="not released"):
        loop.run(toggled.resume())
    after = [loop.run(one.update(random_batch(2))) for one in (steady, toggled)]
    assert after[0].checksum == after[1].checksum


def test_a_learning_rate_of_zero_changes_nothing(loop, trainer):
    still = trainer(ranks=1, options=TrainerOptions(optimizer=OptimizerOptions(learning_rate=0.0)))
    first = loop.run(still.start())
    assert loop.run(still.update(random_batch(1))).checksum == first.checksum


def test_an_update_lasts_at_least_as_long_as_the_emulated_device_needs(loop, trainer):
    paced = trainer(ranks=1, update_s=1.0)
    loop.run(paced.start())
    result = loop.run(paced.update(random_batch(1)))
    assert result.duration_s >= 1.0
    assert result.metrics.compute_s < result.duration_s


def test_a_single_rank_gives_its_memory_back_before_its_first_update_too(loop, trainer):
    """It shards nothing: its parameters were read from a file that is mapped, which cannot be emptied."""
    one = trainer(ranks=1)
    loop.run(one.start())
    released = loop.run(one.release())
    assert released.after_bytes < 0.05 * released.before_bytes
    loop.run(one.resume())
    loop.run(one.update(random_batch(1)))


def test_a_rank_that_dies_during_an_update_is_named_at_once_and_takes_the_others_with_it(loop, trainer):
    doomed = trainer()
    loop.run(doomed.start())
    pids = doomed.pids

    async def kill_during_update():
        os.kill(pids[1], signal.SIGSTOP)
        update = asyncio.ensure_future(doomed.update(random_batch(1)))
        await asyncio.sleep(0.2)
        assert not update.done()
        with pytest.raises(TrainerError, match="the ranks are busy with 'update'"):
            await doomed.release()
        os.kill(pids[1], signal.SIGKILL)
        await update

    with pytest.raises(TrainerLostError, match="update: rank 1 of 2 is gone: ended by SIGKILL"):
        loop.run(kill_during_update())
    assert not any(_lives(pid) for pid in pids)
    with pytest.raises(TrainerLostError, match="release: the trainer is not running: update: rank 1 of 2 is gone"):
        loop.run(doomed.release())
    again = loop.run(doomed.start())
    assert again.version == 1
    assert loop.run(doomed.update(random_batch(1, version=1))).version == 2


def test_a_rank_that_does_not_answer_ends_the_call_at_its_deadline(loop, trainer):
    stuck = trainer(limits=TrainerLimits(update_s=0.5))
    loop.run(stuck.start())
    pids = stuck.pids
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(TrainerLostError, match=r"update: no answer to 'update' within 0.5 s \(rank 0, 1 of 2\)"):
        loop.run(stuck.update(random_batch(1)))
    assert not any(_lives(pid) for pid in pids)


def test_a_cancelled_call_leaves_no_rank_in_an_unknown_state(loop, trainer):
    one = trainer(ranks=1)
    loop.run(one.start())
    pids = one.pids

    async def cancel_during_update():
        os.kill(pids[0], signal.SIGSTOP)
        async with asyncio.timeout(0.2):
            await one.update(random_batch(1))

    with pytest.raises(TimeoutError):
        loop.run(cancel_during_update())
    assert not any(_lives(pid) for pid in pids)


def test_what_a_rank_cannot_do_is_one_line_that_names_it(loop, trainer, model, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        TrainerError, match=r"start: rank 0 of 1: TrainingStateError: no model at .*empty: it has no config"
    ):
        loop.run(LocalTrainer(trainer()._group._forks, empty, tmp_path / "x", OPTIONS, ranks=1).start())
    shutil.copy2(model / "config.json", empty)
    with pytest.raises(ValueError, match="ranks is 0; training needs at least 1"):
        trainer(ranks=0)


def test_stop_ends_all_ranks_and_may_be_repeated(loop, trainer):
    one = trainer()
    loop.run(one.start())
    pids = one.pids
    loop.run(one.stop())
    assert not any(_lives(pid) for pid in pids)
    loop.run(one.stop())
    with pytest.raises(TrainerLostError, match="not running: it was stopped"):
        loop.run(one.update(random_batch(1)))


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# With epsilon as large as the rate, a first step of AdamW moves a weight by its gradient (up to |g| / 1e4 of it).
AS_GRADIENTS = TrainerOptions(
    loss=LossOptions(truncation=2.0, kl_coefficient=0.3, entropy_coefficient=0.01),
    optimizer=OptimizerOptions(learning_rate=1e4, epsilon=1e4, max_gradient_norm=1e6),
    micro_batch_tokens=60,
)


def test_reference_and_actor_give_the_same_gradients_wherever_the_reference_works(loop, trainer, tmp_path):
    """TideRL section 5.1, two actors and a reference rank: in between, before all under one swap, and streamed."""
    ranks = trainer("ref-actor", ranks=3, options=dataclasses.replace(AS_GRADIENTS, reference_rank=True))
    loop.run(ranks.start())
    # After a first update the actor differs from the reference, and the KL term has a gradient.
    loop.run(ranks.update(random_batch(1)))
    loop.run(ranks.save_checkpoint(tmp_path / "first"))
    moved = {}
    for mode in RefActor:
        loop.run(ranks.load_checkpoint(tmp_path / "first"))
        before = weights(ranks.newest.uri)
        ranks.ref_actor = mode
        update = loop.run(ranks.update(random_batch(2)))
        assert update.metrics.kl > 1e-4
        moved[mode] = {name: before[name] - after for name, after in weights(update.snapshot_path).items()}
        loop.run(ranks.release())
        loop.run(ranks.resume())
    plain = moved.pop(RefActor.INLINE)
    assert max(float(gradient.abs().max()) for gradient in plain.values()) > 1e-2
    assert max(difference(plain, gradients) for gradients in moved.values()) < 1e-6


class DearSwaps(LocalTrainer):
    """Ranks that seem to swap for a minute."""

    async def update(self, batch):
        result = await super().update(batch)
        dearer = (
            dataclasses.replace(rank, update_s=rank.update_s + 60.0, asking_s=rank.asking_s + 60.0)
            for rank in result.times
        )
        return dataclasses.replace(result, times=tuple(dearer))


def test_auto_forms_ranks_anew_where_swaps_are_dear_and_gradients_stay_the_same(loop, trainer, tmp_path):
    options = dataclasses.replace(AS_GRADIENTS, ref_actor=RefActor.COLOCATED)
    ranks = trainer("auto", ranks=2, options=options, kind=DearSwaps)
    records = []
    loop.run(ranks.start())
    loop.run(ranks.update(random_batch(1)))
    loop.run(ranks.save_checkpoint(tmp_path / "first"))

    def gradients(update):
        loop.run(ranks.load_checkpoint(tmp_path / "first"))
        before = weights(ranks.newest.uri)
        result = loop.run(update(random_batch(2)))
        assert result.metrics.kl > 1e-4
        return {name: before[name] - after for name, after in weights(result.snapshot_path).items()}

    ranks.ref_actor = RefActor.INLINE
    plain = gradients(ranks.update)
    assert max(float(gradient.abs().max()) for gradient in plain.values()) > 1e-2
    ranks.ref_actor = RefActor.COLOCATED
    auto = AutoRefActor(ranks, records.append)
    assert max(difference(plain, gradients(auto.update)) for _ in range(4)) < 1e-6
    together, apart = RefActorMode.COLOCATED, RefActorMode.DECOUPLED
    modes = [(record.decision.mode, record.decision.changes) for record in records]
    assert modes == [(together, False), (together, False), (apart, True), (apart, False)]
    assert records[0].costs == records[1].costs == {}
    assert 29.0 < records[2].costs[together].swap_s < 31.0
    assert 0.0 < records[2].decision.decoupled_s < 30.0 < records[2].decision.colocated_s
    loop.run(ranks.form_anew(reference_rank=False))
    assert difference(plain, gradients(ranks.update)) < 1e-6

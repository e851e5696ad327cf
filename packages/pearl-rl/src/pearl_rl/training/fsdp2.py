"""One training rank: a causal LM sharded by torch FSDP2 (`fully_shard`), updated by GRPO with AdamW.

All ranks call the same methods in the same order; each method is a collective. gloo on the CPU, NCCL on CUDA.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from pearl_executor.engines.torch.weights import weights_checksum
from pearl_executor.ports import MemoryReport
from pearl_rl.training.checkpoint import CheckpointError, load_shards, save_shards
from pearl_rl.training.device_memory import ParkedTensors, device_bytes, settled_bytes
from pearl_rl.training.grpo import TokenScores, grpo_loss, score_tokens
from pearl_rl.training.options import ComputeDtype, OptimizerOptions, RefActor, TrainerOptions
from pearl_rl.training.ref_actor import (
    AggregatedReference,
    InlineReference,
    NoReference,
    ParkingSwap,
    ReferenceRank,
    ReferenceSource,
    StreamedReference,
    reference_score,
)
from pearl_rl.training.shards import MicroTensors
from pearl_rl.training.stopwatch import Stopwatch, timed_score

_SUMS = ("tokens", "entropy_sum", "kl_sum", "drift_sum", "importance_sum", "limited")


_RESIDUE = 50
"""A release has settled once at most one part in so many is left."""

_PARAMETERS = "model."
"""How the names of parameters begin in a checkpoint."""


class TrainingStateError(RuntimeError):
    """A call that does not fit what the rank holds now."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The full weights that rank 0 wrote."""

    checksum: str
    bytes: int


class FsdpTrainer:
    """One rank's model, optimizer and generator.

    `mesh` is one-dimensional over all ranks. Expects the default process group; `spill` is a file of this rank's own,
    for `release`. `weights` is a folder to begin with in place of the model's own weights, which the reference keeps.
    """

    def __init__(
        self, model_path: Path, options: TrainerOptions, mesh: DeviceMesh, spill: Path, weights: Path | None = None
    ) -> None:
        self.options = options
        self.optimizer_steps = 0
        self._mesh = mesh
        self._spill = spill
        self._device = _device(options.device)
        self._parked: ParkedTensors | None = None
        torch.manual_seed(options.seed + mesh.get_rank())
        self._model = _sharded(weights or model_path, options, mesh, self._device)
        self._names = dict(self._model.named_parameters())
        self._reference: nn.Module | None = None
        if options.loss.kl_coefficient > 0:
            self._reference = _sharded(model_path, options, mesh, self._device).requires_grad_(False)
        self._optimizer = _adamw(self._names.values(), options.optimizer)
        # Checkpoints talk in the background: on a group of their own they cannot meet the update's collectives.
        members = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        self._saving_group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        self._saving: Future[None] | None = None
        self._swap = ParkingSwap(self._reference_tensors, self._actor_tensors, self._settle, spill)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(parameter.numel() for parameter in self._names.values())

    # ---- update -----------------------------------------------------------------------------------------------------

    def update(
        self, steps: Sequence[Sequence[MicroTensors]], references: ReferenceSource | None = None
    ) -> dict[str, float]:
        """Train on this rank's share: for each epoch and optimizer step, its micro-batches (as many on every rank).

        `references` gives the reference's log-probabilities; None: this rank's own reference, in between.

        Returns sums over this rank's share, for the control plane to add up over ranks (`tokens`, `entropy_sum`, …,
        `loss`), and what is equal on all ranks (`gradient_norm`, `learning_rate`, `optimizer_steps`, `skipped_steps`).
        A step whose gradient is not finite changes nothing and counts as skipped.
        """
        self._require_memory("update")
        totals = dict.fromkeys(("loss", "padding", *_SUMS), 0.0)
        norm, rate, skipped = 0.0, self.options.optimizer.learning_rate_at(self.optimizer_steps), 0
        source = self.references(RefActor.INLINE) if references is None else references
        for _ in range(self.options.epochs):
            for micros in steps:
                source.open(micros)
                for number, micro in enumerate(micros):
                    self._accumulate(micro, totals, partial(source.logprobs, number))
                rate = self.options.optimizer.learning_rate_at(self.optimizer_steps)
                norm = self._optimizer_step(rate)
                skipped += not math.isfinite(norm)
        count = self.options.epochs * max(1, len(steps))
        totals["loss"] /= count
        return {
            **totals,
            "gradient_norm": norm if math.isfinite(norm) else -1.0,
            "learning_rate": rate,
            "optimizer_steps": float(self.optimizer_steps),
            "skipped_steps": float(skipped),
        }

    def references(self, mode: RefActor, watch: Stopwatch | None = None) -> ReferenceSource:
        """Where this rank's reference log-probabilities come from in `mode`; nowhere without a KL term.

        `watch` times this rank's own scoring.
        """
        reference = self._reference
        if reference is None:
            return NoReference()
        if mode is RefActor.DECOUPLED:
            # The rank after the actors' is the reference's; this rank's own copy gives its place to the actor.
            self._swap.to_actor()
            return StreamedReference(self._mesh.size())
        score = reference_score(reference, self.options.loss.temperature)
        if watch is not None:
            score = timed_score(score, watch)
        if mode is RefActor.INLINE:
            self._swap.restore()
            return InlineReference(score)
        return AggregatedReference(score, self._swap)

    def _settle(self) -> None:
        for model in self._models():
            _reshard(model)

    def _accumulate(
        self, micro: MicroTensors, totals: dict[str, float], reference: Callable[[], Tensor | None]
    ) -> None:
        loss = self.options.loss
        mask = micro.mask[:, 1:]
        scores = self._scores(self._model, micro.tokens, loss.entropy_coefficient > 0)
        # The reference is asked for only now: the loss belongs to the backward (TideRL section 5.1).
        terms = grpo_loss(scores, micro.logprobs[:, 1:], micro.advantages, mask, micro.weights, loss, reference())
        # FSDP averages gradients over ranks; the weights already divide by the whole mini-batch.
        torch.autograd.backward(terms.loss * self._mesh.size())
        totals["loss"] += float(terms.loss.detach())
        totals["padding"] += micro.padding
        for name in _SUMS:
            totals[name] += float(getattr(terms, name))

    def _scores(self, model: nn.Module, tokens: Tensor, entropy_gradient: bool) -> TokenScores:
        # Rows are padded on the right and attention is causal: no real token sees padding, so no mask is needed.
        logits = model(input_ids=tokens, use_cache=False).logits
        return score_tokens(logits, tokens, self.options.loss.temperature, entropy_gradient)

    def _optimizer_step(self, learning_rate: float) -> float:
        norm = nn.utils.clip_grad_norm_(self._names.values(), self.options.optimizer.max_gradient_norm)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(value):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self.optimizer_steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        return value

    # ---- weights and checkpoints ------------------------------------------------------------------------------------

    def write_weights(self, folder: Path) -> PublishedWeights | None:
        """Gather the full weights under their Hugging Face names; rank 0 writes `folder/model.safetensors`.

        One parameter at a time is whole on every rank. Returns None on the other ranks.
        """
        self._require_memory("write_weights")
        _reshard(self._model)
        whole: dict[str, Tensor] = {}
        dtype = _torch_dtype(self.options.dtype)
        for name, parameter in self._names.items():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if self._mesh.get_rank() == 0:
                # Of a single rank the whole is the parameter itself, and what was once shared with numpy, for its
                # checksum, can never be given away: so a copy.
                alone = self._mesh.size() == 1
                whole[name] = full.detach().to("cpu", dtype, copy=alone).contiguous()
        if self._mesh.get_rank() != 0:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "model.safetensors"
        save_file(whole, file, metadata={"format": "pt"})
        return PublishedWeights(weights_checksum(whole), file.stat().st_size)

    def save(self, folder: Path) -> None:
        """Begin this rank's part of a checkpoint: the state of now is copied, and written while training goes on.

        The checkpoint is complete once the control plane adds its state.
        """
        self._require_memory("save")
        self._finish_saving()
        _reshard(self._model)
        rank = self._mesh.get_rank()
        self._saving = save_shards(folder, self._state(), torch.get_rng_state(), rank, self._saving_group)

    def _finish_saving(self) -> None:
        """Wait for the checkpoint under way; its folder tells whether it was written."""
        if self._saving is not None:
            self._saving.exception()
            self._saving = None

    def load(self, folder: Path, optimizer_steps: int, parameters: int, moments_only: bool = False) -> None:
        """Take the state of a checkpoint, written by any number of ranks. Raises `CheckpointError`.

        With `moments_only` the parameters stay as they are.
        """
        self._require_memory("load")
        if parameters != self.parameters:
            raise CheckpointError(f"{folder} is of a model of {parameters} parameters, this one has {self.parameters}")
        _reshard(self._model)
        state = self._state()
        if moments_only:
            state = {name: tensor for name, tensor in state.items() if not name.startswith(_PARAMETERS)}
        generator = load_shards(folder, state, self._mesh.get_rank(), self._mesh.get_group())
        if generator is not None:
            torch.set_rng_state(generator)
        self.optimizer_steps = optimizer_steps
        for parameter in self._names.values():
            self._optimizer.state[parameter]["step"].fill_(optimizer_steps)

    def _state(self) -> dict[str, Tensor]:
        """Everything that training changes, sharded, by name."""
        state: dict[str, Tensor] = {}
        for name, parameter in self._names.items():
            moments = self._optimizer.state[parameter]
            state[f"{_PARAMETERS}{name}"] = parameter.detach()
            state[f"exp_avg.{name}"] = moments["exp_avg"]
            state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        return state

    # ---- device memory ----------------------------------------------------------------------------------------------

    def release(self) -> MemoryReport:
        """Give parameters, gradients and optimizer state away; measured bytes before and after."""
        self._require_memory("release")
        if self._device.type == "cpu":
            # A checkpoint's copy would count as memory of the device; elsewhere it is host memory that is soon free.
            self._finish_saving()
        self._optimizer.zero_grad(set_to_none=True)
        for model in self._models():
            _reshard(model)
        self._parked = ParkedTensors(self._held(), self._spill)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        given = self._parked.size_bytes
        after = settled_bytes(self._device, enough=given // _RESIDUE)
        # What it will hold again, and nothing that happened to live beside it.
        return MemoryReport(after + given, after)

    def resume(self) -> MemoryReport:
        """Take everything back as it was."""
        if self._parked is None:
            raise TrainingStateError("resume: the training memory is not released")
        before = device_bytes(self._device)
        self._parked.restore()
        self._parked = None
        return MemoryReport(before, device_bytes(self._device))

    def _held(self) -> Iterator[Tensor]:
        # Model first: it is what the next update needs first when memory comes back.
        yield from self._actor_tensors()
        yield from self._reference_tensors()

    def _actor_tensors(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
        for moments in self._optimizer.state.values():
            yield moments["exp_avg"]
            yield moments["exp_avg_sq"]

    def _reference_tensors(self) -> Iterator[Tensor]:
        if self._reference is not None:
            yield from self._reference.parameters()
            yield from self._reference.buffers()

    def _models(self) -> list[nn.Module]:
        return [self._model] if self._reference is None else [self._model, self._reference]

    def _require_memory(self, call: str) -> None:
        if self._parked is not None:
            raise TrainingStateError(f"{call}: the training memory is released; resume first")


def join_ranks(rank: int, ranks: int, meeting: "Path | Store", device: str, timeout_s: float) -> DeviceMesh:
    """Form the process group of all ranks, who meet in a file or a store, and return its mesh."""
    from datetime import timedelta

    store = FileStore(str(meeting), ranks) if isinstance(meeting, Path) else meeting
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    return init_device_mesh(device, (ranks,))


def reference_rank(model_path: Path, options: TrainerOptions, spill: Path) -> ReferenceRank:
    """The reference of decoupled mode: whole, on this rank's device."""
    model = _loaded(model_path, _device(options.device)).requires_grad_(False)
    model.to(_torch_dtype(options.dtype))
    for tensor in (*model.parameters(), *model.buffers()):
        # What was read from a file may share its mapping, which cannot be given away.
        tensor.data = tensor.data.clone()
    return ReferenceRank(model, options.loss.temperature, spill)


def _loaded(path: Path, device: torch.device) -> nn.Module:
    """The model of a Hugging Face folder with float32 weights."""
    if not (path / "config.json").is_file():
        raise TrainingStateError(f"no model at {path}: it has no config.json")
    config = AutoConfig.from_pretrained(path)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).to(device)
    model.train()
    return model


def _sharded(path: Path, options: TrainerOptions, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The model of a Hugging Face folder with float32 master weights, each decoder layer a unit of sharding."""
    model = _loaded(path, device)
    for tensor in (*model.parameters(), *model.buffers()):
        # A single rank shards nothing and would keep the file's mapping, which cannot be given away.
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    policy = MixedPrecisionPolicy()
    if options.dtype is not ComputeDtype.FLOAT32:
        policy = MixedPrecisionPolicy(param_dtype=_torch_dtype(options.dtype), reduce_dtype=torch.float32)
    units = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _adamw(parameters: Iterable[nn.Parameter], options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW whose state exists from the start, so that memory and checkpoints look the same before the first step."""
    optimizer = torch.optim.AdamW(
        list(parameters),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.epsilon,
        weight_decay=options.weight_decay,
        foreach=True,
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            zero = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
            optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": zero, "exp_avg_sq": zero.clone()}
    return optimizer


def _reshard(model: nn.Module) -> None:
    # Parameters of the root group stay whole after a forward; state, offload and checkpoints need the shards.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _torch_dtype(dtype: ComputeDtype) -> torch.dtype:
    return torch.bfloat16 if dtype is ComputeDtype.BFLOAT16 else torch.float32


def _device(kind: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

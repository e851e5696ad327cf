"""The testbed of TideRL section 6.1 in our terms: engines, training times, and workloads, each number with its origin.

Nothing here is fitted to TideRL's results. The engines' costs are the kernel tables and the `paper` parameter set of
all other simulations; what neither has is assumed, and says so.
"""

from dataclasses import dataclass, replace
from math import ceil

from pearl_planner.catalog import GpuSpec, ModelSpec, find_gpu, find_model
from pearl_planner.ref_actor import MicroBatchCosts
from pearl_rl.rollout.environments.protocol import Task
from pearl_rl.simulation.batch_run import WorkerModel
from pearl_rl.simulation.kernels import IterationOverheads, WorkerCosts
from pearl_rl.simulation.parameters import load_parameters
from pearl_rl.simulation.requests import SimulatedEngineLimits
from pearl_rl.simulation.tiderl_rollout import VisualWindow
from pearl_rl.simulation.turn_model import bundled_turn_model
from pearl_rl.simulation.workload import ModelWorkload, Script, WorkloadOptions

PCIE_FRACTION = 0.8
"""Part of the PCIe rate that copies of whole models reach; assumed."""
TRAINER_MEMORY_FRACTION = 0.9
"""Part of a trainer's device memory for weights, gradients and optimizer; assumed."""
CONTEXT_SWITCH_S = 0.05
"""Changing the model that runs without moving it: allocator, streams, communicators; assumed."""


QWEN3_VL_4B = ModelSpec(
    name="Qwen3-VL-4B",
    source="config.json of Qwen/Qwen3-VL-4B-Instruct (Apache-2.0)",
    layers=36,
    hidden=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=9728,
    vocab=151_936,
    max_position=262_144,
    # 4,022,468,096 of the language model, whose embedding is its head, and 415,347,712 of the vision tower.
    params_total=4_437_815_808,
    params_active=4_022_468_096,
    flops_per_token=8_044_544_000,
    kv_bytes_per_token=147_456,
    attention_flops_per_context_token=589_824,
)
"""Not in the catalog, whose models have one tower. The second one counts in memory and in copies of the model; what it
computes for each screenshot does not."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Trajectories of one benchmark of TideRL's Table 4."""

    name: str
    model: str
    options: WorkloadOptions
    turn_model: str = "webshop"
    window: VisualWindow | None = None

    def scripts(self, tasks: int, group_size: int, seed: int = 0, first: int = 0) -> list[Script]:
        """The scripts of `tasks` samples from number `first` on; neighbours share a task."""
        workload = ModelWorkload(bundled_turn_model(self.turn_model), self.options, seed)
        scripts = (
            workload.script(Task(id=f"{n // group_size:06d}", seed=0, payload={}), n)
            for n in range(first, first + tasks)
        )
        return [script if self.window is None else _with_screenshots(script, self.window) for script in scripts]


def _with_screenshots(script: Script, window: VisualWindow) -> Script:
    """Each turn's prompt ends with a screenshot."""
    turns = (replace(turn, prompt_tokens=turn.prompt_tokens + window.image_tokens) for turn in script.turns)
    return replace(script, turns=tuple(turns))


WEBSHOP = Workload(
    "WebShop",
    "qwen2.5-7b",
    WorkloadOptions(
        # Appendix C.1: at most 20 turns and 8,192 tokens.
        max_context_tokens=8192,
        max_turns=20,
        # Table 4: 8 rounds and 3,400 tokens on average at the beginning; the ReAct transcripts have 6.9 and 430.
        turns_scale=1.16,
        first_prompt_scale=14.0,
        prompt_scale=9.0,
        # Figure 2 and Table 3: about 650 tokens/s over 548.5 s for 1,056 tasks, 40 tokens a turn.
        response_scale=2.5,
    ),
)
OSWORLD = Workload(
    "OSWorld",
    "qwen3-vl-4b",
    WorkloadOptions(
        # Appendix C.2: at most 50 turns. Screenshots come on top of these, and their window bounds the context.
        max_context_tokens=16_384,
        max_turns=50,
        # Table 4: 35 rounds and sequences of 12,000 tokens at the beginning, screenshots included. What is observed is
        # the screenshot, so the text is what the model generates.
        turns_scale=5.4,
        first_prompt_scale=30.0,
        prompt_scale=0.25,
        response_scale=8.4,
        tool_scale=10.0,
        reset_s=30.0,
    ),
    # 1280 x 720 pixels, of which 32 x 32 are one token (patches of 16, merged two by two; 22 rows, the rest is cut).
    window=VisualWindow(image_tokens=40 * 22),
)


@dataclass(frozen=True, slots=True)
class TidePlatform:
    """H100s that roll out and train one model."""

    model: ModelSpec
    gpu: GpuSpec
    worker: WorkerModel

    @staticmethod
    def of(model: str) -> "TidePlatform":
        """A testbed for a model of the catalog, or for the one of section 6.4, one GPU a worker."""
        spec = QWEN3_VL_4B if model == QWEN3_VL_4B.name.lower() else find_model(model)
        gpu = find_gpu("h100")
        parameters = load_parameters("paper", model)
        engine = parameters.engine
        room = gpu.hbm_bytes * engine.memory_fraction - engine.reserve_bytes - spec.weight_bytes
        limits = SimulatedEngineLimits(
            kv_tokens=int(room / spec.kv_bytes_per_token),
            chunk_tokens=engine.chunk_tokens,
            # Section 6.5: 1,024 is the most that the baseline may run.
            max_running=1024,
            reserve_tokens=64,
        )
        # The paper set's cost of a phase change is calibrated on SGLang and PEARL's figures; TideRL runs vLLM.
        costs = WorkerCosts(spec, gpu, 1, IterationOverheads())
        worker = WorkerModel(
            costs=costs,
            limits=limits,
            kv_bytes_per_token=spec.kv_bytes_per_token,
            link_bytes_per_s=1.0,
            link_latency_s=0.0,
        )
        return TidePlatform(spec, gpu, worker)

    def forward_s(self, tokens: int) -> float:
        """A forward pass over `tokens` tokens on one GPU, by the kernel tables of prefill."""
        return self.worker.costs.prefill_s([(tokens, 0)], 0)

    def least_actors(self) -> int:
        """Data-parallel ranks that hold the actor, by Megatron's bytes: 2 a weight, 4 its gradient, 12 the optimizer's.

        The optimizer's are spread over all ranks; what is left of each holds activations.
        """
        weights = self.model.params_total
        room = self.gpu.hbm_bytes * TRAINER_MEMORY_FRACTION - 6 * weights
        if room <= 0:
            raise ValueError(f"{self.model.name}: weights and gradients alone do not fit into {self.gpu.name}")
        return ceil(12 * weights / room)

    def micro_batch(self, tokens: int, *, offload: bool) -> MicroBatchCosts:
        """Costs of one micro-batch on one rank; with `offload` the model that does not run is in host memory."""
        forward = self.forward_s(tokens)
        copy_s = self.model.weight_bytes / (self.gpu.pcie_gbps * 1e9 * PCIE_FRACTION)
        return MicroBatchCosts(
            ref_forward_s=forward,
            actor_forward_s=forward,
            # Twice the arithmetic of the forward.
            actor_backward_s=2.0 * forward,
            # One model out, the other one in; each direction has its own lanes.
            swap_s=CONTEXT_SWITCH_S + (copy_s if offload else 0.0),
        )

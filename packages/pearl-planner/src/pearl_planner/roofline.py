"""A platform profile from a model's shape and a GPU's peak figures, before anything was measured.

Each part of an iteration takes as long as its slower resource: weights and KV are read from device memory, products
run at a fraction of the peak. The fractions are in `Efficiency`; they make the sums of public kernel tables for
Qwen3-8B and Qwen3-30B-A3B on two H100s (decode within about 15 %, prefill within their spread).
"""

import math
from dataclasses import dataclass

from pearl_planner.catalog import BundledProfile, CatalogError, GpuSpec, ModelSpec
from pearl_state.profile import PlatformProfile, WorkloadProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fractions of peak figures that kernels reach, and times that no peak figure covers."""

    weight_read: float = 0.8
    """Of memory bandwidth, for weights."""
    kv_read: float = 0.94
    """Of memory bandwidth, for KV."""
    dense_flops: float = 0.6
    """Of peak FLOP/s, for dense products and attention."""
    expert_flops: float = 0.2
    """Of peak FLOP/s, for the products of a mixture of experts (small, unevenly loaded)."""
    network: float = 0.8
    """Of the NICs' bandwidth."""
    layer_s: float = 22e-6
    """Per layer and iteration: launches and gaps between kernels, seconds."""
    all_reduce_s: float = 8e-6
    """One of the two all-reduces of a layer under tensor parallelism, seconds."""
    memory: float = 0.88
    """Fraction of device memory that weights and KV may take."""
    reserve_bytes: float = 6e9
    """Activations and graphs, bytes a GPU."""


_DEFAULT = Efficiency()


def check_tensor_parallel(model: ModelSpec, tensor_parallel: int) -> None:
    """Raise `CatalogError` where the heads of `model` do not divide over `tensor_parallel` GPUs."""
    if tensor_parallel < 1:
        raise CatalogError(f"tensor parallelism of {tensor_parallel}: must be at least 1")
    if not _divides(model, tensor_parallel):
        fitting = ", ".join(str(tp) for tp in range(1, model.heads + 1) if _divides(model, tp))
        raise CatalogError(
            f"tp = {tensor_parallel} does not divide the {model.heads} heads and {model.kv_heads} KV heads "
            f"of {model.name}; use one of {fitting}"
        )


def _divides(model: ModelSpec, tp: int) -> bool:
    # Above the number of KV heads each of them is held by several ranks.
    return model.heads % tp == 0 and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)


def kv_bytes_per_token(model: ModelSpec, tensor_parallel: int) -> float:
    """K: KV bytes of one token over all ranks of a worker; more where ranks hold the same head."""
    if model.shared_latent_kv:
        return model.kv_bytes_per_token * tensor_parallel
    return model.kv_bytes_per_token * max(1.0, tensor_parallel / model.kv_heads)


def decode_iteration_s(
    model: ModelSpec,
    gpu: GpuSpec,
    tensor_parallel: int,
    *,
    sequences: float,
    context_tokens: float,
    efficiency: Efficiency = _DEFAULT,
) -> float:
    """Duration of a decode iteration of one worker with `sequences` running, each at `context_tokens`, seconds."""
    read = model.weight_bytes - model.embedding_bytes - model.expert_bytes
    if model.experts:
        # Each sequence picks its experts independently: the more sequences, the more of the experts are read.
        unused = (1.0 - model.experts_per_token / model.experts) ** sequences
        read += model.expert_bytes * (1.0 - unused)
    bandwidth = tensor_parallel * gpu.hbm_gbps * 1e9
    weights = read / (bandwidth * efficiency.weight_read)
    products = sequences * model.flops_per_token / _flops(model, gpu, tensor_parallel, efficiency)
    kv = sequences * context_tokens * kv_bytes_per_token(model, tensor_parallel) / (bandwidth * efficiency.kv_read)
    reduce = 2 * efficiency.all_reduce_s if tensor_parallel > 1 else 0.0
    return max(weights, products) + kv + model.layers * (efficiency.layer_s + reduce)


def prefill_token_s(
    model: ModelSpec,
    gpu: GpuSpec,
    tensor_parallel: int,
    *,
    context_tokens: float,
    efficiency: Efficiency = _DEFAULT,
) -> float:
    """t_prefill: one more prompt token in a full iteration, attending `context_tokens`, seconds."""
    limit = model.attention_context_limit
    attended = min(context_tokens, limit) if limit else context_tokens
    dense = tensor_parallel * gpu.bf16_tflops * 1e12 * efficiency.dense_flops
    products = (model.flops_per_token - model.head_flops) / _flops(model, gpu, tensor_parallel, efficiency)
    return products + attended * model.attention_flops_per_context_token / dense


def _flops(model: ModelSpec, gpu: GpuSpec, tensor_parallel: int, efficiency: Efficiency) -> float:
    """Reachable FLOP/s of the products of one worker."""
    peak = gpu.fp8_tflops if model.bytes_per_weight == 1 and gpu.fp8_tflops else gpu.bf16_tflops
    return tensor_parallel * peak * 1e12 * (efficiency.expert_flops if model.experts else efficiency.dense_flops)


def platform_profile(
    model: ModelSpec,
    gpu: GpuSpec,
    tensor_parallel: int,
    *,
    context_tokens: float,
    most_sequences: int = 64,
    efficiency: Efficiency = _DEFAULT,
) -> PlatformProfile:
    """The profile of one worker of `tensor_parallel` GPUs. A and b are the line through 1…`most_sequences` sequences.

    Raises `CatalogError` where the heads do not divide, or the weights do not fit.
    """
    check_tensor_parallel(model, tensor_parallel)
    room = tensor_parallel * (gpu.hbm_bytes * efficiency.memory - efficiency.reserve_bytes) - model.weight_bytes
    if room <= 0:
        need = math.ceil(model.weight_bytes / (gpu.hbm_bytes * efficiency.memory - efficiency.reserve_bytes))
        raise CatalogError(
            f"{model.name} ({model.weight_bytes / 1e9:.0f} GB of weights) does not fit on {tensor_parallel} x "
            f"{gpu.name}; it needs at least {need}"
        )
    counts = range(1, max(2, most_sequences) + 1)
    times = [
        decode_iteration_s(
            model, gpu, tensor_parallel, sequences=n, context_tokens=context_tokens, efficiency=efficiency
        )
        for n in counts
    ]
    fixed, slope = _line(list(counts), times)
    kv_bytes = kv_bytes_per_token(model, tensor_parallel)
    origin = f"roofline of {model.name} on {tensor_parallel} x {gpu.name} at {context_tokens:.0f} context tokens"
    names = (
        "decode_fixed_s",
        "decode_per_sequence_s",
        "prefill_per_token_s",
        "kv_bytes_per_token",
        "transfer_bytes_per_s",
        "kv_capacity_bytes",
        "prefix_capacity_tokens",
    )
    return PlatformProfile(
        decode_fixed_s=fixed,
        decode_per_sequence_s=slope,
        prefill_per_token_s=prefill_token_s(
            model, gpu, tensor_parallel, context_tokens=context_tokens, efficiency=efficiency
        ),
        kv_bytes_per_token=kv_bytes,
        transfer_bytes_per_s=tensor_parallel * gpu.nic_gbps * 1e9 * efficiency.network,
        kv_capacity_bytes=room,
        prefix_capacity_tokens=room / kv_bytes,
        origin={**dict.fromkeys(names, origin), "overhead_per_turn_s": "unknown before telemetry: taken as 0"},
    )


def _line(xs: list[int], ys: list[float]) -> tuple[float, float]:
    """Least-squares intercept and slope; the intercept is kept positive."""
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / math.fsum(
        (x - mean_x) ** 2 for x in xs
    )
    return max(mean_y - slope * mean_x, 0.1 * min(ys)), slope


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningInputs:
    """What `decide` needs, and in words where it comes from."""

    workload: WorkloadProfile
    platform: PlatformProfile
    notes: tuple[str, ...] = ()


def planning_inputs(profile: BundledProfile, model: ModelSpec, gpu: GpuSpec, tensor_parallel: int) -> PlanningInputs:
    """The profile's workload, with its platform where it was made for this worker, else with a roofline of it."""
    check_tensor_parallel(model, tensor_parallel)
    workload = WorkloadProfile(**profile.workload)
    if (model.name, gpu.name, tensor_parallel) == (profile.model, profile.gpu, profile.tensor_parallel):
        return PlanningInputs(
            workload=workload,
            platform=PlatformProfile(**profile.platform),
            notes=(f"workload and platform: bundled profile {profile.name}",),
        )
    context = workload.context_tokens or workload.max_context_tokens
    return PlanningInputs(
        workload=workload,
        platform=platform_profile(model, gpu, tensor_parallel, context_tokens=context, most_sequences=workload.batch),
        notes=(
            f"workload: bundled profile {profile.name}",
            f"platform: analytic roofline of {model.name} on {tensor_parallel} x {gpu.name}, "
            f"not measured (the profile's own is for {profile.model} on {profile.tensor_parallel} x {profile.gpu})",
        ),
    )

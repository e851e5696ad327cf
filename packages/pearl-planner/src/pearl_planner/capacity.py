"""The capacity constraints of PEARL section 4.2.

They bind disaggregation only. A colocated worker that lacks KV room lets requests wait in its own queue: prefill and
decode share one pool, so nothing is prefilled that cannot decode, and the batch still completes (later, which the
extended model prices). Under disaggregation a prefilled request that finds no room on the decode side keeps its KV on
the prefill side, and the two pools block each other.
"""

import math

from pearl_state.profile import PlatformProfile, WorkloadProfile


def kv_bytes_per_sequence(workload: WorkloadProfile, platform: PlatformProfile, headroom: float = 1.0) -> float:
    """K_seq: KV bytes of one trajectory, 0 where no context is known.

    Taken from the mean context where it is known, since the constraint is on the sum over the batch, and the sum of B
    contexts stays near B times their mean; else from the largest context. `headroom` multiplies it.
    """
    return (workload.context_tokens or workload.max_context_tokens) * platform.kv_bytes_per_token * headroom


def least_decode_workers(workload: WorkloadProfile, platform: PlatformProfile, headroom: float = 1.0) -> int:
    """Smallest N_D with B·K_seq ≤ N_D·H_max; 1 where either side is unknown."""
    if not platform.kv_capacity_bytes:
        return 1
    needed = workload.batch * kv_bytes_per_sequence(workload, platform, headroom) / platform.kv_capacity_bytes
    # A product of floats may end a few ulp above the whole number it stands for.
    return max(1, math.ceil(needed - 1e-9))


def prefill_overload(prefill_path_s: float, decode_path_s: float, limit: float) -> bool:
    """Whether λ_P = B·S·ΔL outruns the prefill pool: its path takes more than `limit` times the decode path.

    While prefill takes longer than decode, queues build before it and decode idles. At the best ratio the quotient is
    below N_D/(N_D − 1) ≤ 2, so that the default limit of 2 never removes the best candidate where N_D ≥ 2.
    """
    return prefill_path_s > limit * decode_path_s

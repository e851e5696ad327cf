"""The bubble-aware makespan models of PEARL section 4.3.1: eqs. (1), (2) and (3) exactly as printed.

Each is a product of statistics and counts, so `PrintedModel` folds everything that does not depend on the counts once.
`extended.ExtendedModel` has the same shape and adds what the printed equations lack.
"""

from typing import Protocol

from pearl_state.decision import MakespanTerms
from pearl_state.errors import ProfileError
from pearl_state.profile import PlatformProfile, WorkloadProfile


class MakespanModel(Protocol):
    """Predicts the makespan of a batch of which all workers take part. All times in seconds."""

    def colocated(self, workers: int) -> MakespanTerms:
        """T_coloc of N = `workers` ≥ 1 colocated workers."""
        ...

    def disaggregated(self, prefill_workers: int, decode_workers: int) -> MakespanTerms:
        """T_dis of N_P and N_D ≥ 1 workers."""
        ...

    def total_s(self, prefill_workers: int, decode_workers: int) -> float:
        """T_dis alone, as `disaggregated` gives it. At N workers it falls and then rises with N_P (see `search`)."""
        ...

    def paths(self, prefill_workers: int, decode_workers: int) -> tuple[float, float]:
        """Makespan if only the prefill path, or only the decode path, took time.

        The first never rises with N_P, the second never with N_D.
        """
        ...


class PrintedModel:
    """Eqs. (1)-(3) as printed, with the factors that do not depend on the worker counts folded."""

    __slots__ = ("_decode_fixed", "_decode_load", "_environment", "_overhead", "_prefill_load", "_theta", "_transfer")

    def __init__(self, workload: WorkloadProfile, platform: PlatformProfile) -> None:
        turns = workload.turns
        tokens = turns * workload.batch * workload.new_prompt_tokens
        self._prefill_load = tokens * platform.prefill_per_token_s
        self._transfer = tokens * platform.kv_bytes_per_token / platform.transfer_bytes_per_s
        self._decode_fixed = turns * workload.response_tokens * platform.decode_fixed_s
        self._decode_load = turns * workload.response_tokens * platform.decode_per_sequence_s * workload.batch
        self._theta = 1.0 + workload.bubble_ratio
        self._overhead = turns * platform.overhead_per_turn_s
        self._environment = workload.environment_s

    def colocated(self, workers: int) -> MakespanTerms:
        """Eq. (1): S·[B·ΔL/N·t_prefill + r·(A + b·B/N) + T_over] + T_env."""
        prefill = self._prefill_load / workers
        decode = self._decode_fixed + self._decode_load / workers
        return MakespanTerms(
            total_s=prefill + decode + self._overhead + self._environment,
            prefill_s=prefill,
            decode_s=decode,
            overhead_s=self._overhead,
            environment_s=self._environment,
            bottleneck="shared",
        )

    def disaggregated(self, prefill_workers: int, decode_workers: int) -> MakespanTerms:
        """Eqs. (2) and (3): max(T_prefill, T_decode) + T_env; `prefill_s` excludes the transfer."""
        prefill = self._prefill_load / prefill_workers
        decode = self._decode_fixed * self._theta + self._decode_load / decode_workers
        first = prefill + self._transfer
        bound = first > decode
        total = (first if bound else decode) + self._environment
        # By position, as in `extended`; neither overhead nor prefill again.
        return MakespanTerms(
            total, prefill, decode, self._transfer, 0.0, self._environment, 0.0, "prefill" if bound else "decode"
        )

    def total_s(self, prefill_workers: int, decode_workers: int) -> float:
        """max(T_prefill, T_decode) + T_env."""
        return max(self.paths(prefill_workers, decode_workers))

    def paths(self, prefill_workers: int, decode_workers: int) -> tuple[float, float]:
        """T_prefill + T_env and T_decode + T_env."""
        return (
            self._prefill_load / prefill_workers + self._transfer + self._environment,
            self._decode_fixed * self._theta + self._decode_load / decode_workers + self._environment,
        )


def printed_colocated(workload: WorkloadProfile, platform: PlatformProfile, workers: int) -> MakespanTerms:
    """Eq. (1) for N = `workers` colocated workers. Raises `ProfileError` where N < 1."""
    if workers < 1:
        raise ProfileError(f"colocation with {workers} workers: needs at least 1")
    return PrintedModel(workload, platform).colocated(workers)


def printed_disaggregated(
    workload: WorkloadProfile, platform: PlatformProfile, prefill_workers: int, decode_workers: int
) -> MakespanTerms:
    """Eqs. (2) and (3) for N_P and N_D workers. Raises `ProfileError` where either is < 1."""
    if prefill_workers < 1 or decode_workers < 1:
        raise ProfileError(f"disaggregation as {prefill_workers}P{decode_workers}D: needs at least 1 of each")
    return PrintedModel(workload, platform).disaggregated(prefill_workers, decode_workers)

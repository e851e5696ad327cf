"""The throughput of a configuration under a steady load: what replaces a batch's makespan under continuous injection.

Where others enter as trajectories end (TideRL section 2.1), no batch has an end to predict. N trajectories are under
way at any time, and a configuration π serves as many of them as its KV holds; the others wait outside, as Continuous
Task Batching has them do. Those that are served are a closed network with a population of their own:

    n(π) = min(N, K(π)),    X(π) = n(π) / C(π, n(π)),    T(π) = N·S̄ / X(π) = N/n(π) · S̄·C(π, n(π))

K(π) is what the decode or colocated workers of π hold, C(π, n) the duration of a turn with n under way (the cycle of
`extended`), S̄ the mean turns of a trajectory, X turns a second. T is how long π takes for all turns of those under way:
of two configurations the faster one by T has the larger X, which is why everything that compares makespans (hysteresis,
switching costs, eq. (7), the fit of what turns leave over) works on T unchanged. Little's law, and nothing else, leads
from one to the other. A configuration whose KV holds few is slow here, and never infeasible.
"""

from dataclasses import replace

from pearl_planner.capacity import kv_bytes_per_sequence
from pearl_planner.extended import ExtendedModel, mean_trajectories, work_turns
from pearl_planner.makespan import MakespanModel
from pearl_state.decision import MakespanTerms
from pearl_state.profile import PlatformProfile, WorkloadProfile


class SteadyModel:
    """`MakespanModel` of a profile that is `steady`: T(π) as above, each term of it likewise."""

    __slots__ = ("_headroom", "_held", "_models", "_platform", "_workload")

    def __init__(self, workload: WorkloadProfile, platform: PlatformProfile, kv_headroom: float = 1.0) -> None:
        workload = _of_mean_trajectories(workload)
        each_bytes = kv_bytes_per_sequence(workload, platform, kv_headroom)
        self._held = platform.kv_capacity_bytes / each_bytes if platform.kv_capacity_bytes and each_bytes else None
        self._workload = workload
        self._platform = platform
        self._headroom = kv_headroom
        self._models: dict[int, ExtendedModel] = {}

    def served(self, holders: int) -> int:
        """n(π): how many of those under way `holders` decode or colocated workers serve at a time; at least 1."""
        batch = self._workload.batch
        return batch if self._held is None else min(batch, max(1, int(self._held * holders)))

    def _model(self, holders: int) -> tuple[ExtendedModel, float]:
        """The closed network of those that are served, and N/n."""
        served = self.served(holders)
        model = self._models.get(served)
        if model is None:
            model = ExtendedModel(replace(self._workload, batch=served), self._platform, self._headroom)
            self._models[served] = model
        return model, self._workload.batch / served

    def colocated(self, workers: int) -> MakespanTerms:
        """See `MakespanModel`."""
        model, rounds = self._model(workers)
        return _times(model.colocated(workers), rounds)

    def disaggregated(self, prefill_workers: int, decode_workers: int) -> MakespanTerms:
        """See `MakespanModel`."""
        model, rounds = self._model(decode_workers)
        return _times(model.disaggregated(prefill_workers, decode_workers), rounds)

    def total_s(self, prefill_workers: int, decode_workers: int) -> float:
        """See `MakespanModel`."""
        model, rounds = self._model(decode_workers)
        return rounds * model.total_s(prefill_workers, decode_workers)

    def paths(self, prefill_workers: int, decode_workers: int) -> tuple[float, float]:
        """See `MakespanModel`; with fewer served at a time both grow, so neither need fall with its own workers."""
        model, rounds = self._model(decode_workers)
        first, second = model.paths(prefill_workers, decode_workers)
        return rounds * first, rounds * second


def deciding_model(workload: WorkloadProfile, platform: PlatformProfile, kv_headroom: float = 1.0) -> MakespanModel:
    """The model by which configurations are compared: of a steady load where the profile is one, else of a batch."""
    kind = SteadyModel if workload.steady else ExtendedModel
    return kind(workload, platform, kv_headroom)


def _of_mean_trajectories(workload: WorkloadProfile) -> WorkloadProfile:
    """S̄ turns and the environment time of as many: no batch ends here, so the slowest trajectory's are on no path."""
    turns = work_turns(workload)
    outside_s = turns * workload.turn_environment_s or workload.environment_s
    return mean_trajectories(replace(workload, turns=turns, environment_s=outside_s))


_SECONDS = tuple(name for name in MakespanTerms._fields if name.endswith("_s"))


def _times(terms: MakespanTerms, rounds: float) -> MakespanTerms:
    if rounds == 1.0:
        return terms
    return terms._replace(**{name: rounds * getattr(terms, name) for name in _SECONDS})

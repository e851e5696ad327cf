"""The planner as a guest of another framework: feed it what that framework measures, ask it what to do.

`Guest` is a value, like everything here: `observe_step` returns the next one. It needs neither executor nor control
loop of PEARL; `integration/guests` calls it from hook points of verl, slime and ROLL, and `serve` offers it over HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pearl_planner.catalog import find_gpu, find_model, find_profile
from pearl_planner.decide import STEPS_AHEAD
from pearl_planner.fit import StepMeasurement, fit_overhead, fit_platform
from pearl_planner.gate import NOBODY_S, GateVerdict, ToggleCosts, borrow_gate
from pearl_planner.policies import Policy, pearl
from pearl_planner.roofline import planning_inputs
from pearl_planner.workload_fit import fit_workload
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.samples import DecodeSample, PrefillSample, TransferSample, TurnSample

_WINDOW_STEPS: Final = 3
"""Newest steps whose trajectories describe the workload."""

_WINDOW_SAMPLES: Final = 2000
"""Newest engine samples of a kind that a fit uses."""

_MEMORY_STEPS: Final = 20
"""Newest steps that the cost per turn of a mode is fitted to."""

StepTurns = tuple[tuple[TurnSample, ...], ...]
"""One step: each finished trajectory as its turns, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """What the planner has been told so far, and the questions it answers."""

    workload: WorkloadProfile
    platform: PlatformProfile
    policy: Policy = field(default_factory=pearl)
    current: Configuration | None = None
    """What runs now; None where nothing does. `adopt` moves it."""
    costs: ToggleCosts = field(default_factory=ToggleCosts)
    calibrated: bool = False
    """Whether measurements back A, b and t_prefill."""
    device: PlatformProfile | None = None
    """`platform` as engine samples alone give it, without what steps say of modes; None before the first step."""
    refused: tuple[str, ...] = ()
    """Fields that the last fit left at their prior value, each with the reason."""
    turns: tuple[StepTurns, ...] = ()
    decode: tuple[DecodeSample, ...] = ()
    prefill: tuple[PrefillSample, ...] = ()
    transfer: tuple[TransferSample, ...] = ()
    steps: tuple[StepMeasurement, ...] = ()

    @classmethod
    def start(
        cls,
        *,
        model: str,
        gpu: str,
        tensor_parallel: int = 1,
        batch: int | None = None,
        profile: str = "swe-32k",
        policy: Policy | None = None,
        calibrated: bool = False,
    ) -> "Guest":
        """Begin with a bundled workload profile and a roofline of the hardware; measurements replace both.

        No ratio is chosen before measurements back it, unless `calibrated` takes both at their word.
        Raises `CatalogError` for names that the catalog does not have.
        """
        inputs = planning_inputs(find_profile(profile), find_model(model), find_gpu(gpu), tensor_parallel)
        workload = inputs.workload if batch is None else replace(inputs.workload, batch=batch)
        return cls(workload=workload, platform=inputs.platform, policy=policy or pearl(), calibrated=calibrated)

    def observe_step(
        self,
        trajectories: Sequence[Sequence[TurnSample]] = (),
        *,
        batch: int | None = None,
        decode: Sequence[DecodeSample] = (),
        prefill: Sequence[PrefillSample] = (),
        transfer: Sequence[TransferSample] = (),
        segments: Sequence[tuple[Configuration, float]] = (),
    ) -> "Guest":
        """Take in one rollout step and refit (PEARL sections 4.3.2 and 5). Everything is optional.

        `segments` are the configurations that the step ran under, each with its seconds. Raises `ProfileError` for a
        sample that is not finite or negative; then nothing was taken in.
        """
        turns = self.turns
        if trajectories:
            turns = (*turns, tuple(tuple(one) for one in trajectories))[-_WINDOW_STEPS:]
        kept_decode = (*self.decode, *decode)[-_WINDOW_SAMPLES:]
        kept_prefill = (*self.prefill, *prefill)[-_WINDOW_SAMPLES:]
        kept_transfer = (*self.transfer, *transfer)[-_WINDOW_SAMPLES:]
        steps = self.steps
        if segments:
            steps = (*steps, StepMeasurement(segments=tuple(segments)))[-_MEMORY_STEPS:]
        work = fit_workload(
            [one for step in turns for one in step], batch=batch or self.workload.batch, prior=self.workload
        )
        device = fit_platform(
            decode=kept_decode, prefill=kept_prefill, transfer=kept_transfer, prior=self.device or self.platform
        )
        over = fit_overhead(steps, workload=work.profile, platform=device.profile)
        reasons = {**work.refused, **device.refused, **over.refused}
        return replace(
            self,
            workload=work.profile,
            platform=over.profile,
            calibrated=self.calibrated or device.calibrated,
            device=device.profile,
            refused=tuple(f"{name}: {reason}" for name, reason in reasons.items()),
            turns=turns,
            decode=kept_decode,
            prefill=kept_prefill,
            transfer=kept_transfer,
            steps=steps,
        )

    def observe_toggle(self, *, activation_s: float | None = None, deactivation_s: float | None = None) -> "Guest":
        """Account what lending the training GPUs, or taking them back, took. Raises `ValueError` for no duration."""
        costs = self.costs
        if activation_s is not None:
            costs = costs.observe_activation(activation_s)
        if deactivation_s is not None:
            costs = costs.observe_deactivation(deactivation_s)
        return replace(self, costs=costs)

    def adopt(self, configuration: Configuration | None) -> "Guest":
        """Say what runs from now on."""
        return replace(self, current=configuration)

    def choose(self, workers: int, *, remaining_fraction: float = 1.0, steps_ahead: float = STEPS_AHEAD) -> Decision:
        """Mode and roles for `workers` rollout workers, from what runs now. Raises as `decide`."""
        return self.policy.decide(
            workload=self.workload,
            platform=self.platform,
            budget_workers=workers,
            current=self.current,
            remaining_fraction=remaining_fraction,
            steps_ahead=steps_ahead,
            calibrated=self.calibrated,
        )

    def borrow(self, *, dedicated: int, lendable: int, remaining: int) -> GateVerdict:
        """Eq. (7): should `lendable` workers on idle training GPUs join the `dedicated` ones for what remains?

        `remaining` trajectories of the batch are not complete; more than the batch count as a whole one.
        Raises `ValueError` for negative counts.
        """
        if dedicated < 0 or lendable < 1:
            raise ValueError(f"dedicated = {dedicated}, lendable = {lendable}: needs at least 0 and at least 1")
        return borrow_gate(
            remaining=min(remaining, self.workload.batch),
            batch=self.workload.batch,
            ded_s=self._makespan_s(dedicated) if dedicated else NOBODY_S,
            full_s=self._makespan_s(dedicated + lendable),
            toggle_cost_s=self.costs.toggle_s,
        )

    def _makespan_s(self, workers: int) -> float:
        return replace(self, current=None).choose(workers).predicted_s

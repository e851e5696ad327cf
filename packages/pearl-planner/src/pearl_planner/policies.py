"""Policies: who chooses the configuration, and whether the pool grows, borrows, or stays as it is. All pure."""

from dataclasses import dataclass, field, replace
from typing import Protocol, Required, TypedDict, Unpack, runtime_checkable

from pearl_planner.decide import DecideSettings, decide
from pearl_planner.switching import SwitchCosts
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision, SwitchKind
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode


class Question(TypedDict, total=False):
    """What a policy is asked, as keyword arguments; what is left out is as `pearl_planner.decide.decide` takes it."""

    workload: Required[WorkloadProfile]
    platform: Required[PlatformProfile]
    budget_workers: Required[int]
    current: Configuration | None
    remaining_fraction: float
    steps_ahead: float
    pinned: Configuration | None
    calibrated: bool


class Policy(Protocol):
    """Chooses a configuration for a budget, and says which elastic resources it uses at all."""

    @property
    def name(self) -> str:
        """Short name, for reports."""
        ...

    @property
    def expands(self) -> bool:
        """Whether it takes preemptible GPUs."""
        ...

    @property
    def borrows(self) -> bool:
        """Whether it borrows idle training GPUs."""
        ...

    def decide(self, **asked: Unpack[Question]) -> Decision:
        """As `pearl_planner.decide.decide`."""
        ...


@runtime_checkable
class Observing(Protocol):
    """A policy that learns what switches cost."""

    def observing(self, kind: SwitchKind, seconds: float) -> Policy:
        """The same policy after it saw a switch of `kind` take `seconds`."""
        ...


@runtime_checkable
class Recalling(Observing, Protocol):
    """A policy whose learned costs outlive its process: a journal keeps them."""

    @property
    def costs(self) -> SwitchCosts:
        """What it takes switches to cost by now."""
        ...

    def recalling(self, costs: SwitchCosts) -> Policy:
        """The same policy with `costs` that it had learned before."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPolicy:
    """A policy that asks the PD Decision Engine, with some of its freedom taken away."""

    name: str
    expands: bool = True
    borrows: bool = True
    modes: frozenset[Mode] = frozenset(Mode)
    configuration: Configuration | None = None
    """Held whatever the model says (scaled to the budget); None lets the model choose."""
    settings: DecideSettings = field(default_factory=DecideSettings)
    costs: SwitchCosts = field(default_factory=SwitchCosts)

    def decide(self, **asked: Unpack[Question]) -> Decision:
        """As `pearl_planner.decide.decide`; a person's `pinned` comes before the policy's own configuration."""
        asked["pinned"] = asked.get("pinned") or self.configuration
        return decide(**asked, settings=self.settings, costs=self.costs, allowed=self.modes)

    def observing(self, kind: SwitchKind, seconds: float) -> "ModelPolicy":
        """See `Observing`."""
        return replace(self, costs=self.costs.observe(kind, seconds))

    def recalling(self, costs: SwitchCosts) -> "ModelPolicy":
        """See `Recalling`."""
        return replace(self, costs=costs)


def pearl(settings: DecideSettings | None = None, costs: SwitchCosts | None = None) -> ModelPolicy:
    """Both kinds of elastic GPUs, both modes, the ratio chosen by the model."""
    return ModelPolicy(name="pearl", settings=settings or DecideSettings(), costs=costs or SwitchCosts())


def colocated_elastic() -> ModelPolicy:
    """Preemptible GPUs, colocation only, no borrowing (as RLBoost)."""
    return ModelPolicy(name="colocated_elastic", borrows=False, modes=frozenset({Mode.COLOCATION}))


def tiderl(settings: DecideSettings | None = None, costs: SwitchCosts | None = None) -> ModelPolicy:
    """Reserved GPUs, colocated, and training's while it waits for data (as TideRL)."""
    return replace(pearl(settings, costs), name="tiderl", expands=False, modes=frozenset({Mode.COLOCATION}))


def static_pd(configuration: Configuration) -> ModelPolicy:
    """Preemptible GPUs, one P:D ratio for the whole run, no borrowing (as systems with a static PD split)."""
    return ModelPolicy(name=f"static_{configuration}", borrows=False, configuration=configuration)


def pinned(configuration: Configuration) -> ModelPolicy:
    """Both kinds of elastic GPUs, with a person's configuration held whatever the model says."""
    return ModelPolicy(name=f"pinned_{configuration}", configuration=configuration)


def fixed(configuration: Configuration | None = None) -> ModelPolicy:
    """Reserved GPUs only, no borrowing; colocated, or as `configuration` says (as ROLL)."""
    modes = frozenset({Mode.COLOCATION}) if configuration is None else frozenset(Mode)
    return ModelPolicy(name="fixed", expands=False, borrows=False, modes=modes, configuration=configuration)

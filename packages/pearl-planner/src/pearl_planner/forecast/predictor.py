"""The workload predictor of Prorsa section 4.1: changes of phase in, forecasts of the next S seconds out.

    predictor.observe(change)          every change of every trajectory, in order
    predictor.forecast(now_s, ...)     every S seconds

Pure in the sense of this package: what it returns follows from the calls before, and it reads no clock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pearl_planner.forecast.admissions import Admissions, InstanceQueue, Waiting, decode_admissions
from pearl_planner.forecast.correction import BiasCorrection
from pearl_planner.forecast.durations import ByClass, Class, EmpiricalDurations
from pearl_planner.forecast.history import History, startup_class, tool_class, turn_class
from pearl_planner.forecast.injection import InjectionPolicy, NoInjection
from pearl_planner.forecast.sources import (
    Arrival,
    backlog_tokens,
    launch_horizon_s,
    sampler_launches,
    tool_arrivals,
    weighted_tokens,
)
from pearl_planner.forecast.speed import LEAST_FRESH
from pearl_state.phases import LiveTrajectories, PhaseChange
from pearl_state.trajectory import TrajectoryId, TrajectoryPhase
from pearl_state.worker import WorkerId

_P = TrajectoryPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorSettings:
    """What a forecast looks at."""

    horizon_s: float = 10.0
    """S (Prorsa section 5.1 uses 10 s)."""
    ranks: int = 1
    """Attention ranks of one instance: prompts that it serves side by side, each as fast as alone."""
    returns: bool = True
    """Whether trajectories in Decode count that are expected to come back within the horizon. The paper leaves them to
    the bias correction, which is enough where a turn takes longer than the horizon; here most are shorter.
    """
    tool_residuals: bool = True
    """Whether tools end as likely as those of their class that had run for as long, as startup does (eq. 6). The
    paper's mean (eqs. 9 to 11) is enough where tools of a class take about as long; where some take a thousand times
    as long as others, whatever outlives the mean would be expected at once.
    """
    reclaimed: bool = True
    """Whether K̂ leaves out what is admitted and over again within the horizon. The paper does not model reclamation,
    which is right where decode takes longer than the horizon; where it takes less, K̂ would be a flow, not a stock.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """W^P by source, full prompt tokens (eq. 15), and what is not of the paper."""

    sampler: float = 0.0
    startup: float = 0.0
    ready: float = 0.0
    tool: float = 0.0
    inflight: float = 0.0
    returns: float = 0.0
    """Of trajectories in Decode (see `PredictorSettings.returns`)."""

    @property
    def total(self) -> float:
        """Ŵ^P before correction."""
        return self.sampler + self.startup + self.ready + self.tool + self.inflight + self.returns

    @property
    def arriving(self) -> float:
        """The part that is not there yet."""
        return self.sampler + self.startup + self.tool + self.returns


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Demand over [t, t + S), and what section 4.2 divides it by."""

    at_s: float
    horizon_s: float
    sources: Sources
    prefill_tokens: float
    """Ŵ^P: backlog, plus arrivals after bias correction."""
    admitted_raw_tokens: float
    admitted_tokens: float
    """Â^D after bias correction."""
    admitted_kv_bytes: float
    """K̂^D after bias correction."""
    decode_kv_bytes: float
    """K^D now."""
    tokens_per_s: float
    """θ^P of one prefill instance."""
    arriving_tokens_per_s: float
    """θ^P for what is not there yet; `tokens_per_s` where nothing arrives."""


@dataclass(frozen=True, slots=True)
class WindowOutcome:
    """A forecast beside what its window then had, tokens."""

    forecast: Forecast
    prefill_tokens: float
    """Backlog at its begin plus arrivals during it."""
    admitted_tokens: float


@dataclass(slots=True)
class WorkloadPredictor:
    """Follows all trajectories of a run. `forecast` is to be called every S seconds: it also closes the window before
    and learns from its residual.
    """

    settings: PredictorSettings = field(default_factory=PredictorSettings)
    injection: InjectionPolicy = field(default_factory=NoInjection)
    """f(·), which whoever injects on rewards sets as its sampler's state changes. Batches, and groups that enter when
    newer weights make room for them, follow no reward.
    """
    live: LiveTrajectories = field(default_factory=LiveTrajectories)
    history: History = field(default_factory=History)
    prefill_bias: BiasCorrection = field(default_factory=BiasCorrection)
    admission_bias: BiasCorrection = field(default_factory=BiasCorrection)
    last: WindowOutcome | None = None
    """The window that the newest forecast closed."""
    _open: Forecast | None = None
    _arrived: float = 0.0
    _admitted: float = 0.0

    def observe(self, change: PhaseChange) -> None:
        """Take one change of phase in. Raises `StateError` for an illegal one."""
        before = self.live.apply(change)
        self.history.observe(before, change)
        if change.phase is _P.READY and (before is None or before.phase not in (_P.READY, _P.PREFILL, _P.DECODE)):
            self._arrived += change.prompt_tokens
        elif change.phase is _P.DECODE:
            self._admitted += change.prompt_tokens

    def forecast(
        self,
        now_s: float,
        *,
        prefill: Sequence[WorkerId],
        profiled_tokens_per_s: float,
        kv_bytes_per_token: float,
        generated: Mapping[TrajectoryId, int] | None = None,
    ) -> Forecast:
        """Demand over the next S seconds, from what was observed until now.

        `prefill` are the instances that prefill now (for colocated workers: all). `profiled_tokens_per_s` is how many
        tokens without a cached prefix one of them computes a second, until its speed is measured.
        `kv_bytes_per_token` is κ^D. `generated` are the tokens that trajectories in Decode have so far, where they are
        known.
        """
        settings, by_phase = self.settings, self._by_phase()
        ready, serving = by_phase[_P.READY], by_phase[_P.PREFILL]
        sampler, startup, tool, returns = self._arriving(now_s, by_phase, settings.horizon_s)
        sources = Sources(
            sampler=weighted_tokens(sampler),
            startup=weighted_tokens(startup),
            ready=backlog_tokens(record.prompt_tokens for record in ready),
            tool=weighted_tokens(tool),
            inflight=backlog_tokens(record.prompt_tokens for record in serving),
            returns=weighted_tokens(returns),
        )
        length, fresh = self._mix([*ready, *serving], sources.arriving)
        speed = self._speed(length, fresh, profiled_tokens_per_s)
        coming = self._arriving_speed([*sampler, *startup, *tool, *returns], profiled_tokens_per_s)
        service = self._service(speed, fresh, profiled_tokens_per_s)
        self._close(now_s)
        factor = self.prefill_bias.factor
        # Who arrives too late to be prefilled before the end is no admission of this window.
        latency_s, token_s = service
        prefilled_s = latency_s + token_s * fresh * length
        soon = self._arriving(now_s, by_phase, settings.horizon_s - prefilled_s)
        arrivals = [replace(arrival, weight=arrival.weight * factor) for source in soon for arrival in source]
        admitted = self._admissions(now_s, prefill, ready, serving, arrivals, service, kv_bytes_per_token)
        correction = self.admission_bias.factor
        decoding = by_phase[_P.DECODE]
        grown = 0 if generated is None else sum(generated.get(record.trajectory, 0) for record in decoding)
        forecast = Forecast(
            at_s=now_s,
            horizon_s=settings.horizon_s,
            sources=sources,
            prefill_tokens=sources.ready + sources.inflight + factor * sources.arriving,
            admitted_raw_tokens=admitted.tokens,
            admitted_tokens=correction * admitted.tokens,
            admitted_kv_bytes=correction * admitted.kv_bytes * self._staying(),
            decode_kv_bytes=kv_bytes_per_token * (sum(record.prompt_tokens for record in decoding) + grown),
            tokens_per_s=speed,
            arriving_tokens_per_s=speed if coming is None else coming,
        )
        self._open, self._arrived, self._admitted = forecast, 0.0, 0.0
        return forecast

    def _arriving(
        self, now_s: float, by_phase: Mapping[TrajectoryPhase, list[PhaseChange]], horizon_s: float
    ) -> tuple[tuple[Arrival, ...], ...]:
        """What arrives within `horizon_s`: of the sampler, of environments that start, of tools, and of trajectories in
        Decode. None does within a horizon that is not above 0.
        """
        if horizon_s <= 0.0:
            return (), (), (), ()
        starting = [*by_phase[_P.ENVIRONMENT_STARTING], *by_phase[_P.SAMPLED]]
        return (
            self._sampler(now_s, by_phase[_P.REWARD], horizon_s),
            self._startup(now_s, starting, horizon_s),
            self._tools(now_s, by_phase[_P.TOOL], horizon_s),
            self._returns(now_s, by_phase[_P.DECODE], horizon_s) if self.settings.returns else (),
        )

    def _by_phase(self) -> dict[TrajectoryPhase, list[PhaseChange]]:
        by_phase: dict[TrajectoryPhase, list[PhaseChange]] = {phase: [] for phase in TrajectoryPhase}
        for record in self.live.records.values():
            by_phase[record.phase].append(record)
        return by_phase

    def _staying(self) -> float:
        """Part of the admissions of a window that is in decode at a time."""
        known = self.history.decode_s.find(())
        if not self.settings.reclaimed or known is None:
            return 1.0
        return min(1.0, known.value / self.settings.horizon_s)

    def _mix(self, backlog: list[PhaseChange], arriving: float) -> tuple[float, float]:
        """(mean length, part that must be computed) of the prompts in the forecast: those that wait, and arrivals like
        those of late.
        """
        history = self.history
        tokens = float(sum(record.prompt_tokens for record in backlog))
        fresh = sum(history.fresh.get(record.trajectory, 1.0) * record.prompt_tokens for record in backlog)
        part = history.fresh_mean.value if len(history.fresh_mean) else 1.0
        length = tokens / len(backlog) if backlog else history.prompt.value
        if arriving > 0.0:
            length = (tokens * length + arriving * history.prompt.value) / (tokens + arriving)
        total = tokens + arriving
        return length, (fresh + part * arriving) / total if total else part

    def _speed(self, length: float, fresh: float, profiled: float) -> float:
        """θ^P for prompts like these.

        Busy intervals of an instance with several ranks tell what it did with the prompts that it had: with few of
        them most ranks had none. What it can do is what its ranks do, side by side, in the seconds that they are busy.
        """
        history, ranks = self.history, self.settings.ranks
        measured = history.speed.tokens_per_s(length, profiled, fresh)
        if ranks == 1 or not history.service.answers:
            return measured
        each_s, token_s = history.service.line(ranks / profiled)
        service_s = each_s + token_s * max(LEAST_FRESH, fresh) * length
        return max(measured, ranks * length / service_s) if service_s > 0.0 else measured

    def _arriving_speed(self, arrivals: list[Arrival], profiled: float) -> float | None:
        """θ^P for the arrivals alone; None without any."""
        tokens = weighted_tokens(arrivals)
        if tokens <= 0.0:
            return None
        new = sum(arrival.weight * arrival.computed_tokens for arrival in arrivals)
        return self._speed(tokens / sum(arrival.weight for arrival in arrivals), new / tokens, profiled)

    def _service(self, speed: float, fresh: float, profiled: float) -> tuple[float, float]:
        """g on one rank, (seconds of any prompt, seconds of each token to compute): as answers told, before any as
        busy intervals did. A rank is one part in `ranks` of its instance.
        """
        service, ranks = self.history.service, self.settings.ranks
        if service.answers:
            return service.line(ranks / profiled)
        return 0.0, ranks / (speed * max(LEAST_FRESH, fresh))

    def _close(self, now_s: float) -> None:
        """Learn from the window that ends now. One that was cut short, or ran over, measured something else."""
        window = self._open
        if window is None:
            return
        backlog = window.sources.ready + window.sources.inflight
        self.last = WindowOutcome(window, backlog + self._arrived, self._admitted)
        if abs(now_s - window.at_s - window.horizon_s) > 0.05 * window.horizon_s:
            return
        self.prefill_bias = self.prefill_bias.observe(window.sources.arriving, self._arrived)
        self.admission_bias = self.admission_bias.observe(window.admitted_raw_tokens, self._admitted)

    # ---- sources ----------------------------------------------------------------------------------------------------

    def _sampler(self, now_s: float, rewarding: list[PhaseChange], horizon_s: float) -> tuple[Arrival, ...]:
        """B.2, at the launch horizon."""
        history = self.history
        delay_s = history.launch_delay.value
        window_s = launch_horizon_s(horizon_s, delay_s)
        chances = []
        for record in rewarding:
            known = history.reward_s.find((record.task,))
            chances.append(0.0 if known is None else known.ends_within(now_s - record.at_s, window_s))
        acceptance = history.acceptance.value if len(history.acceptance) else 1.0
        launches = sampler_launches(chances, min(1.0, acceptance), self.injection, window_s)
        if launches <= 0.0:
            return ()
        mean = history.first_prompt.find(())
        return (Arrival(now_s + delay_s + 0.5 * window_s, mean.value if mean else 0.0, launches),)

    def _startup(self, now_s: float, starting: list[PhaseChange], horizon_s: float) -> tuple[Arrival, ...]:
        """B.3."""
        history = self.history
        return self._residual(now_s, starting, horizon_s, history.startup_s, startup_class, history.first_tokens)

    def _residual(
        self,
        now_s: float,
        records: list[PhaseChange],
        horizon_s: float,
        durations: ByClass[EmpiricalDurations],
        class_of: Callable[[PhaseChange], Class],
        tokens: Callable[[PhaseChange], float],
        share: Callable[[PhaseChange], float] = lambda _record: 1.0,
    ) -> tuple[Arrival, ...]:
        """What ends within the horizon, given how long it has lasted; equal classes share one look-up. Of those that
        end, `share` ask again.
        """
        classes: dict[Class, list[PhaseChange]] = {}
        for record in records:
            classes.setdefault(class_of(record), []).append(record)
        arrivals = []
        for kind, alike in classes.items():
            known = durations.find(kind)
            if known is None:
                continue
            elapsed = np.array([now_s - record.at_s for record in alike])
            chances, residuals = known.residuals_s(elapsed, horizon_s)
            for record, chance, residual_s in zip(alike, chances.tolist(), residuals.tolist(), strict=True):
                if chance > 0.0:
                    whole = tokens(record)
                    new = self.history.new_tokens(record, whole)
                    arrivals.append(Arrival(now_s + residual_s, whole, chance * share(record), new))
        return tuple(arrivals)

    def _tools(self, now_s: float, running: list[PhaseChange], horizon_s: float) -> tuple[Arrival, ...]:
        """B.5."""
        history, known = self.history, []
        if self.settings.tool_residuals:
            return self._residual(now_s, running, horizon_s, history.tool_durations_s, tool_class, self._after_tool)
        for record in running:
            mean = history.tool_s.find(tool_class(record))
            if mean is not None:
                known.append((mean.value, now_s - record.at_s, self._after_tool(record)))
        return tool_arrivals(now_s, horizon_s, known)

    def _after_tool(self, record: PhaseChange) -> float:
        """x̂ of a trajectory whose tool runs."""
        growth = self.history.tool_growth.find(turn_class(record))
        return max(1.0, record.prompt_tokens + (growth.value if growth is not None else 0.0))

    def _returns(self, now_s: float, decoding: list[PhaseChange], horizon_s: float) -> tuple[Arrival, ...]:
        """Trajectories in Decode that will ask again within the horizon; as startup, over the way through the tool."""
        history = self.history

        def after(record: PhaseChange) -> float:
            growth = history.return_growth.find(turn_class(record))
            return max(1.0, record.prompt_tokens + (growth.value if growth is not None else 0.0))

        def share(record: PhaseChange) -> float:
            known = history.returns.find(turn_class(record))
            return known.value if known is not None else 0.0

        return self._residual(now_s, decoding, horizon_s, history.return_s, turn_class, after, share)

    # ---- admissions -------------------------------------------------------------------------------------------------

    def _admissions(
        self,
        now_s: float,
        prefill: Sequence[WorkerId],
        ready: list[PhaseChange],
        serving: list[PhaseChange],
        arrivals: list[Arrival],
        service: tuple[float, float],
        kv_bytes_per_token: float,
    ) -> Admissions:
        """B.7. A prefill under way ends when its prompt is served since its begin, and not before now."""
        history = self.history
        latency_s, token_s = service
        in_flight: dict[WorkerId, list[tuple[float, int]]] = {id_: [] for id_ in prefill}
        queued: dict[WorkerId, list[Waiting]] = {id_: [] for id_ in prefill}
        unassigned: list[Waiting] = []
        for record in serving:
            if record.instance in in_flight:
                new = history.fresh.get(record.trajectory, 1.0) * record.prompt_tokens
                finish_s = max(now_s, record.at_s + latency_s + token_s * new)
                in_flight[record.instance].append((finish_s, record.prompt_tokens))
        for record in sorted(ready, key=lambda record: record.at_s):
            new = history.fresh.get(record.trajectory, 1.0) * record.prompt_tokens
            if record.weights != history.weights:
                # Chosen before newer weights came, it will be computed by them.
                new = max(new, history.new_tokens(record, record.prompt_tokens))
            line = None if record.instance is None else queued.get(record.instance)
            (unassigned if line is None else line).append((record.prompt_tokens, new))
        return decode_admissions(
            now_s=now_s,
            horizon_s=self.settings.horizon_s,
            instances={id_: InstanceQueue(in_flight=in_flight[id_], queued=queued[id_]) for id_ in prefill},
            unassigned=unassigned,
            arrivals=arrivals,
            service_s=lambda new_tokens: token_s * new_tokens,
            latency_s=latency_s,
            kv_bytes=lambda tokens: tokens * kv_bytes_per_token,
            ranks=self.settings.ranks,
        )

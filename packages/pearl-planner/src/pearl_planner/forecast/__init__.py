"""Forecasts of prefill demand and decode admissions from the lifecycles of trajectories (Prorsa 4.1, appendix B)."""

from pearl_planner.forecast.admissions import Admissions, InstanceQueue, completion_times, decode_admissions
from pearl_planner.forecast.correction import BiasCorrection, ForecastError
from pearl_planner.forecast.durations import Average, ByClass, EmpiricalDurations, ema
from pearl_planner.forecast.injection import (
    FixedRate,
    GroupReplenishment,
    InjectionPolicy,
    NoInjection,
    ReplaceOnReward,
)
from pearl_planner.forecast.predictor import (
    Forecast,
    PredictorSettings,
    Sources,
    WindowOutcome,
    WorkloadPredictor,
)
from pearl_planner.forecast.sources import Arrival
from pearl_planner.forecast.speed import BusySpeed

__all__ = [
    "Admissions",
    "Arrival",
    "Average",
    "BiasCorrection",
    "BusySpeed",
    "ByClass",
    "EmpiricalDurations",
    "FixedRate",
    "Forecast",
    "ForecastError",
    "GroupReplenishment",
    "InjectionPolicy",
    "InstanceQueue",
    "NoInjection",
    "PredictorSettings",
    "ReplaceOnReward",
    "Sources",
    "WindowOutcome",
    "WorkloadPredictor",
    "completion_times",
    "decode_admissions",
    "ema",
]

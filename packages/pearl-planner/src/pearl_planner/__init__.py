"""PEARL's planner: every decision, pure. Depends on pearl-state and numpy only."""

from pearl_planner.catalog import CatalogError, GpuSpec, ModelSpec, find_gpu, find_model, find_profile
from pearl_planner.decide import BOTH_MODES, DecideSettings, decide
from pearl_planner.explain import deciding_constraints, explain
from pearl_planner.extended import ExtendedModel
from pearl_planner.fit import (
    FitSettings,
    PlatformFit,
    StepMeasurement,
    fit_overhead,
    fit_platform,
)
from pearl_planner.gate import GateVerdict, ToggleCosts, borrow_gate
from pearl_planner.guest import Guest
from pearl_planner.makespan import MakespanModel, PrintedModel, printed_colocated, printed_disaggregated
from pearl_planner.policies import ModelPolicy, Policy, colocated_elastic, fixed, pearl, static_pd
from pearl_planner.roofline import Efficiency, PlanningInputs, planning_inputs, platform_profile
from pearl_planner.switching import Switch, SwitchCosts, switch_between
from pearl_planner.transition import PlanError, WorkerCosts, choose_members, plan_transition, verify_plan
from pearl_planner.workload_fit import WorkloadFit, fit_workload

__all__ = [
    "BOTH_MODES",
    "CatalogError",
    "DecideSettings",
    "Efficiency",
    "ExtendedModel",
    "FitSettings",
    "GateVerdict",
    "GpuSpec",
    "Guest",
    "MakespanModel",
    "ModelPolicy",
    "ModelSpec",
    "PlanError",
    "PlanningInputs",
    "PlatformFit",
    "Policy",
    "PrintedModel",
    "StepMeasurement",
    "Switch",
    "SwitchCosts",
    "ToggleCosts",
    "WorkerCosts",
    "WorkloadFit",
    "borrow_gate",
    "choose_members",
    "colocated_elastic",
    "decide",
    "deciding_constraints",
    "explain",
    "find_gpu",
    "find_model",
    "find_profile",
    "fit_overhead",
    "fit_platform",
    "fit_workload",
    "fixed",
    "pearl",
    "plan_transition",
    "planning_inputs",
    "platform_profile",
    "printed_colocated",
    "printed_disaggregated",
    "static_pd",
    "switch_between",
    "verify_plan",
]

"""Prorsa that begins with as many prefill as decode workers, whatever the profiles say; its forecasts come fast."""

from dataclasses import replace

from pearl_planner.in_step import prorsa
from pearl_planner.switching import SwitchCosts
from pearl_state import Configuration

policy = replace(
    prorsa(SwitchCosts(flip_s=0.05), persistence_s=1.0, first=Configuration(prefill=1, decode=1)), name="even-prorsa"
)

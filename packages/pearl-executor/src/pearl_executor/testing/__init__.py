"""Fakes that implement the ports in virtual time: programmable faults, a ledger of GPU memory, and death on misuse."""

from pearl_executor.testing.faults import Call, Fault, FaultScript
from pearl_executor.testing.memory import GpuLedger
from pearl_executor.testing.training import FakeTraining, FakeWeights
from pearl_executor.testing.workers import FakeWorkers, next_token
from pearl_executor.testing.world import FakeCall, FakeWorld, row

__all__ = [
    "Call",
    "FakeCall",
    "FakeTraining",
    "FakeWeights",
    "FakeWorkers",
    "FakeWorld",
    "Fault",
    "FaultScript",
    "GpuLedger",
    "next_token",
    "row",
]

"""What a release counts: what it gave away, not what another thread drops a moment later."""

import threading

import pytest

torch = pytest.importorskip("torch")

from pearl_rl.training.device_memory import device_bytes, settled_bytes  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def test_a_copy_that_is_dropped_a_moment_later_is_waited_for() -> None:
    before = device_bytes(CPU)
    copies = [torch.zeros(100_000)]
    assert device_bytes(CPU) >= before + 400_000
    dropping = threading.Timer(0.1, copies.clear)
    dropping.start()
    assert settled_bytes(CPU, enough=before) <= before
    dropping.join(timeout=10)


def test_what_stays_is_told_after_a_bounded_wait() -> None:
    kept = torch.zeros(100_000)
    assert settled_bytes(CPU, enough=0, tries=2, pause_s=0.01) >= kept.nbytes

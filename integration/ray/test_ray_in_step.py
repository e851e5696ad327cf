"""Roles of servers on a Ray cluster's nodes follow the load inside a step."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang_cpu"))
from in_step import check_switched_unnoticed

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.slow]


def test_servers_on_nodes_flip_inside_a_step_and_every_trajectory_says_what_it_would_have_said(
    nodes, tmp_path: Path
) -> None:
    nodes.join(1)
    check_switched_unnoticed(tmp_path, cluster__runtime="ray", cluster__ray__address=nodes.address)

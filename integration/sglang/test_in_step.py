"""Roles of SGLang servers on this machine follow the load inside a step."""

from pathlib import Path

import pytest
from in_step import check_switched_unnoticed

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_servers_flip_in_place_inside_a_step_and_every_trajectory_says_what_it_would_have_said(tmp_path: Path) -> None:
    check_switched_unnoticed(tmp_path)

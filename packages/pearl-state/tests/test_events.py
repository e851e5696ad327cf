"""What no event says, whoever wrote the journal that it comes from."""

import pytest

from pearl_state.events import RolloutBegan, RolloutProgressed


@pytest.mark.parametrize(
    "make",
    [lambda: RolloutBegan(now_s=0.0, step=1, batch=-8), lambda: RolloutProgressed(now_s=0.0, step=1, remaining=-1)],
)
def test_a_count_of_trajectories_is_not_negative(make):
    with pytest.raises(ValueError, match="must be at least 0"):
        make()

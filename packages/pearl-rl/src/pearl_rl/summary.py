"""What a training run amounts to: the object that `pearl-rl train --json` prints as its last line."""

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """Figures of a whole run. The field names are the keys of the JSON object."""

    steps: int
    """Training steps that were completed, those before a resume included."""
    reward_first10: float
    """Mean reward of the first ten steps (of all steps where there are fewer)."""
    reward_last10: float
    """Mean reward of the last ten steps (of all steps where there are fewer)."""
    trajectories: int
    """Trajectories that reached training."""
    lost_trajectories: int
    """Trajectories that were dispatched and neither reached training nor are kept for resumption."""
    stale_served: int
    """Requests that a worker served with a weight version older than the staleness bound allows."""
    expansions: int
    """Groups of workers admitted on newly offered GPUs."""
    reclaims: int
    """Reclaims of GPUs by the provider."""
    borrows: int
    """Times that training GPUs were lent to rollout."""
    returns: int
    """Times that borrowed GPUs went back to training."""
    mode_switches: int
    """Changes between colocation and disaggregation."""
    ratio_switches: int
    """Changes of the prefill/decode ratio within disaggregation."""
    tokens_per_s: float
    """Rollout-generated plus trained tokens over the wall time (PEARL section 6.1)."""
    wall_s: float
    """Duration of the run, seconds."""
    run_dir: str
    """The run folder."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form, in the order of the fields."""
        return asdict(self)

    def to_json_line(self) -> str:
        """The object on one line, without a line end."""
        return json.dumps(self.to_json(), allow_nan=False)

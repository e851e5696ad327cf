"""A Ray cluster of several nodes on this machine, with tokens on, for the tests of this folder."""

import contextlib
import os
import secrets
from importlib.util import find_spec

import pytest

BASE, ELASTIC = {"pearl.zone": "base"}, {"pearl.zone": "elastic"}


class Nodes:
    """A cluster whose nodes come, drain and go."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._start(num_cpus=2, num_gpus=4, labels=BASE, include_dashboard=False)
        self.address = self._cluster.address

    def join(self, gpus):
        return self._start(num_cpus=1, num_gpus=gpus, labels=ELASTIC)

    def _start(self, **options):
        """A node; where the machine is busy Ray gives up after 30 seconds, and the next try finds it less so."""
        for tries_left in (2, 1, 0):
            try:
                return self._cluster.add_node(**options)
            except Exception as error:
                if "timed out during startup" not in str(error) or not tries_left:
                    raise
        return None

    def drain(self, node, within_s):
        """What `ray drain-node` does: say when the node will be gone. Ray itself does not take it away."""
        import time

        from ray._raylet import GcsClient

        reason = 2  # DRAIN_NODE_REASON_PREEMPTION
        deadline_ms = int((time.time() + within_s) * 1000)  # noqa: TID251 - Ray's deadlines are wall times
        accepted, why = GcsClient(address=self.address).drain_node(node.node_id, reason, "spot", deadline_ms)
        assert accepted, why

    def take_away(self, node):
        """The machine goes at once, without a word."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self):
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="session")
def nodes():
    if find_spec("ray") is None:
        pytest.fail("the package ray is missing: `uv sync --group ray`, or `nox -s ray`", pytrace=False)
    # Before ray is imported: it reads them then.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - so Ray spells it
    # A node gives its own agents 15 s, in which a busy machine does not start two Pythons.
    os.environ["RAY_agent_register_timeout_ms"] = "120000"  # noqa: SIM112
    with contextlib.closing(Nodes()) as cluster:
        yield cluster

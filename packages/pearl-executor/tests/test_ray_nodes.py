"""A cluster's nodes as offers and reclaims, with a scripted view of the cluster and no Ray."""

import asyncio
import contextlib

import pytest

from pearl_executor.runtimes.local.processes import ProcessError
from pearl_executor.runtimes.ray.availability import NodeState, RayNodeSource
from pearl_executor.virtual_time import run_virtual
from pearl_state.events import GpusOffered, GpusReclaimed
from pearl_state.worker import GpuId


class View:
    """What the cluster looks like, look by look; the last one stays."""

    def __init__(self, *looks):
        self._looks = list(looks)

    def __call__(self):
        look = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if isinstance(look, Exception):
            raise look
        return look


def follow(view, count, *, gpus=range(4, 8), back_after=None, **options):
    """The first `count` events, and where the GPUs are said to be after each."""

    async def main():
        places = {}
        source = RayNodeSource(view, gpus=gpus, nodes=places, **options)
        found = []
        async with contextlib.aclosing(source.events()) as events:
            async for event in events:
                found.append((event, dict(places)))
                if isinstance(event, GpusReclaimed) and back_after is not None:
                    asyncio.get_running_loop().call_later(back_after, source.returned, event.gpus)
                if len(found) == count:
                    break
        return found

    return asyncio.run(asyncio.wait_for(main(), 20))


A, B = NodeState("a" * 56, 2), NodeState("b" * 56, 2)


def test_a_node_that_joins_is_offered_under_the_runs_numbers():
    (first, _), (second, places) = follow(View([A], [A, B]), 2, poll_s=0.01)
    assert isinstance(first, GpusOffered)
    assert (first.gpus, second.gpus) == ({4, 5}, {6, 7})
    assert first.node == "a" * 12
    assert places == {4: A.id, 5: A.id, 6: B.id, 7: B.id}


def test_a_drain_is_a_reclaim_with_its_deadline_and_a_loss_one_that_is_over():
    draining = NodeState(A.id, 2, leaves_in_s=30.0)
    events = [event for event, _ in follow(View([A, B], [draining, B], [draining]), 4, poll_s=0.01)]
    drained, lost = events[2:]
    assert isinstance(drained, GpusReclaimed)
    assert drained.gpus == {4, 5}
    assert drained.deadline_s - drained.now_s == pytest.approx(30.0)
    assert lost.gpus == {6, 7}
    assert lost.deadline_s == lost.now_s


def test_numbers_are_another_nodes_once_nothing_is_left_on_them():
    draining = NodeState(A.id, 2, leaves_in_s=5.0)
    view = View([A], [draining], [draining, B], [draining, B], [B])
    found = follow(view, 3, gpus=[4, 5], poll_s=0.02, back_after=0.05)
    (offer, _), (reclaim, _), (again, places) = found
    assert offer.gpus == reclaim.gpus == again.gpus == {4, 5}
    assert places == {4: B.id, 5: B.id}


def test_only_whole_workers_are_offered_and_a_draining_node_never():
    view = View([NodeState("c" * 56, 3), NodeState("d" * 56, 1), NodeState("e" * 56, 2, leaves_in_s=9.0)], [B])
    (offer, _), (lost, _) = follow(view, 2, gpus_per_worker=2, poll_s=0.01)
    assert offer.gpus == {4, 5}
    assert lost.gpus == {4, 5}


def test_the_providers_own_notice_counts_where_ray_does_not_know():
    async def watch(node):
        assert node == A.id
        return 25.0

    (_, _), (reclaim, _) = follow(View([A]), 2, poll_s=0.01, watch=watch)
    assert isinstance(reclaim, GpusReclaimed)
    assert reclaim.deadline_s - reclaim.now_s == pytest.approx(25.0)


def test_a_watcher_that_breaks_is_no_notice(caplog):
    async def watch(node):
        raise ProcessError("the node does not start it")

    events = follow(View([A], [A], [A], [A], []), 2, poll_s=0.01, watch=watch)
    assert events[1][0].deadline_s == events[1][0].now_s
    assert "nobody listens to the node's provider any more: the node does not start it" in caplog.text


def test_a_cluster_that_does_not_answer_is_asked_again_and_nothing_is_lost(caplog):
    events = follow(View([A], ProcessError("timed out"), [A], []), 2, poll_s=0.01)
    assert [type(event) for event, _ in events] == [GpusOffered, GpusReclaimed]
    assert "the cluster's nodes cannot be seen: timed out" in caplog.text


def test_returned_gpus_of_others_change_nothing():
    async def main():
        source = RayNodeSource(lambda: [A], gpus=[4, 5], nodes={9: "x"})
        source.returned(frozenset({GpuId(9)}))
        async with contextlib.aclosing(source.events()) as events:
            return (await anext(events)).gpus

    assert run_virtual(main()) == {4, 5}

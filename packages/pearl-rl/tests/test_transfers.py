"""KV hand-overs that keep failing: when the run goes on colocated."""

import asyncio

from pearl_executor.virtual_time import run_virtual
from pearl_rl.control.transfers import TransferWatch
from pearl_state.configuration import Configuration


def watch(*times, ok=()):
    """What follows where hand-overs fail at `times` and succeed at `ok`, seconds."""

    async def main():
        posted, said = [], []
        transfers = TransferWatch(posted.append, said.append, most=3, window_s=10.0, in_a_row=4)
        for at_s in sorted((*times, *ok)):
            await asyncio.sleep(at_s - asyncio.get_running_loop().time())
            transfers.ended(at_s in ok)
        return posted, said

    return run_virtual(main())


def test_hand_overs_that_keep_failing_pin_colocation_and_say_so() -> None:
    posted, said = watch(0.0, 1.0, 2.0, ok=(0.5, 1.5))
    assert [(event.now_s, event.configuration) for event in posted] == [(2.0, Configuration(colocated=1))]
    assert said == ["kv_transfer: 3 hand-overs failed within 10 s; going on colocated"]


def test_rare_ones_pin_colocation_where_none_between_them_succeeds() -> None:
    posted, said = watch(0.0, 9.0, 18.0, 27.0)
    assert [event.now_s for event in posted] == [27.0]
    assert said == ["kv_transfer: 4 hand-overs failed in a row; going on colocated"]


def test_a_failure_now_and_then_changes_nothing() -> None:
    assert watch(0.0, 9.0, 18.0, 27.0, 36.0, ok=(20.0,)) == ([], [])

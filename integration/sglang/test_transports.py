"""Weights over shared memory and over a collective group reach real servers whole, or the server goes."""

import asyncio

import pytest
from servers import Servers

from pearl_executor.engines.sglang.options import WeightTransport
from pearl_executor.ports import GenerateRequest, Sampling, WeightSnapshot, WorkerError
from pearl_state.roles import Role


@pytest.mark.parametrize("weights", [WeightTransport.TENSOR, WeightTransport.IPC, WeightTransport.DISTRIBUTED])
def test_weights_arrive_as_they_do_from_disk(real_interpreter, model, tmp_path, weights):
    with Servers(real_interpreter, model, tmp_path, weights=weights) as servers:
        colocated, decode = servers.start(Role.COLOCATED, Role.DECODE)
        runtime = servers.runtime

        async def play():
            for version, folder in ((1, servers.model), (2, servers.later), (3, servers.model)):
                snapshot = WeightSnapshot(version, str(folder))
                rows = (colocated, decode)
                assert await asyncio.gather(*(runtime.load_weights(row, snapshot) for row in rows)) == [version] * 2
            # Nothing was sent: the server serves on.
            with pytest.raises(WorkerError, match="no weights in"):
                await runtime.load_weights(colocated, WeightSnapshot(4, "/no/such/folder"))
            request = GenerateRequest(
                rid="r", prompt=[20, 30, 40], max_new_tokens=5, sampling=Sampling(temperature=0.0)
            )
            result = await runtime.generate(colocated, request, lambda _: None)
            assert {span.version for span in result.spans} == {3}

        servers.run(play())

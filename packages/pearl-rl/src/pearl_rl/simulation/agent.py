"""The agent of a simulation: plays a script turn by turn through the real router."""

import asyncio
from collections.abc import MutableMapping

from pearl_executor.virtual_time import VirtualTimeLoop
from pearl_rl.rollout.agent import Episode
from pearl_rl.rollout.calls import Generate, ModelCall
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_rl.simulation.runtime import Conversation
from pearl_rl.simulation.workload import Workload
from pearl_state.phases import StartupMode
from pearl_state.trajectory import Trajectory, Turn


class SimulatedAgent:
    """An `Agent` whose tokens are counted and whose tools sleep.

    `conversations` is where the runtime looks up what it cannot see in a prompt that is only a length: the shared
    beginning, and how much of it the previous turn had already.
    """

    def __init__(
        self,
        workload: Workload,
        conversations: MutableMapping[str, Conversation],
        lifecycle: LifecycleTrace | None = None,
    ) -> None:
        self._workload = workload
        self._lifecycle = lifecycle
        self._conversations = conversations

    async def run(self, episode: Episode, generate: Generate) -> Trajectory:
        """Play the episode's script. Raises what `generate` raises."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        started_s = loop.time()
        script = self._workload.script(episode.task, int(episode.trajectory[1:]))
        known = Conversation(root=script.root, root_tokens=script.turns[0].prompt_tokens if script.root else 0)
        self._conversations[episode.trajectory] = known
        if self._lifecycle is not None:
            self._lifecycle.starting(episode.trajectory, StartupMode.PREWARMED)
        try:
            if script.reset_s:
                await asyncio.sleep(script.reset_s)
            turns: list[Turn] = []
            context = before = 0
            for number, scripted in enumerate(script.turns):
                if number:
                    known.stable_tokens = max(known.root_tokens, int(self._workload.stable_fraction * before))
                prompt = range(context, context + scripted.prompt_tokens)
                context = prompt.stop
                call = ModelCall(
                    trajectory=episode.trajectory,
                    turn=number,
                    prompt=range(context),
                    max_new_tokens=scripted.response_tokens,
                )
                result = await generate(call)
                # Where reasoning is dropped, the next prompt leaves this one's path at the response.
                dropped = scripted.retained_tokens < scripted.response_tokens
                before = context if dropped else context + scripted.response_tokens
                context += scripted.retained_tokens
                if scripted.tool_s > 0:
                    await loop.rest(scripted.tool_s)
                turns.append(
                    Turn(
                        prompt=prompt,
                        response=result.tokens,
                        logprobs=result.logprobs,
                        spans=result.spans,
                        environment_s=scripted.tool_s,
                        prefill_s=result.prefill_s,
                        decode_s=result.decode_s,
                        queue_s=result.queue_s,
                        started_s=result.started_s,
                        finished_s=result.finished_s,
                        interruptions=result.interruptions,
                        retained_tokens=scripted.retained_tokens,
                        cached_tokens=result.cached_tokens,
                    )
                )
            return Trajectory(
                id=episode.trajectory,
                group=episode.group,
                task=episode.task.id,
                turns=tuple(turns),
                reward=script.reward,
                dispatch_version=episode.dispatch_version,
                started_s=started_s,
                finished_s=loop.time(),
            )
        finally:
            del self._conversations[episode.trajectory]

"""What the planner knows before the first step of a simulation: the workload, and how fast a worker is.

A simulated segment is a window of a longer run, so a profile of earlier steps is there. It is measured as a real one
would be: the simulated engine is run alone for a moment at several batch sizes and fitted by the planner's own fit.
"""

from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from pearl_planner.fit import fit_platform
from pearl_planner.roofline import platform_profile
from pearl_rl.rollout.environments.protocol import Task
from pearl_rl.simulation.workload import Workload
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.samples import DecodeSample, PrefillSample, TransferSample

if TYPE_CHECKING:
    from pearl_rl.simulation.cluster import SimulatedCluster

_BATCHES = 4
_MOST_SCRIPTS = 4 * 4096
_FIRST = 10**8


def workload_prior(workload: Workload, batch: int, group_size: int) -> WorkloadProfile:
    """The profile of a few batches of the workload that are not those of the run; of very large ones one is enough."""
    batches = max(1, min(_BATCHES, _MOST_SCRIPTS // batch))
    scripts = [
        workload.script(Task(id=f"prior {i // group_size}", seed=0, payload={}), _FIRST + i)
        for i in range(batches * batch)
    ]
    turns = [turn for script in scripts for turn in script.turns]
    contexts, by_turn = [], [0] * max(len(script.turns) for script in scripts)
    for script in scripts:
        context = 0
        for number, turn in enumerate(script.turns):
            contexts.append(context + turn.prompt_tokens)
            by_turn[number] += contexts[-1]
            context += turn.prompt_tokens + turn.retained_tokens
    counts = [len(script.turns) for script in scripts]
    tools = [sum(turn.tool_s for turn in script.turns) for script in scripts]
    slowest = [max(range(k * batch, (k + 1) * batch), key=lambda i: counts[i]) for k in range(batches)]
    return WorkloadProfile(
        batch=batch,
        turns=fmean(counts[i] for i in slowest),
        new_prompt_tokens=fmean(turn.prompt_tokens for turn in turns),
        response_tokens=fmean(turn.response_tokens for turn in turns),
        environment_s=fmean(tools[i] for i in slowest),
        context_tokens=fmean(contexts),
        max_context_tokens=float(max(contexts)),
        mean_turns=fmean(counts),
        turn_environment_s=fmean(turn.tool_s for turn in turns),
        retained_tokens=fmean(turn.retained_tokens for turn in turns),
        active_by_turn=tuple(sum(c > t for c in counts) / len(counts) for t in range(max(counts))),
        context_by_turn=tuple(total / sum(c > t for c in counts) for t, total in enumerate(by_turn)),
        origin={"all": f"{batches} batches of the scenario's workload"},
    )


def platform_prior(cluster: "SimulatedCluster", workload: WorkloadProfile) -> PlatformProfile:
    """The roofline of the scenario's worker or, by default, a fit to runs of its simulated engine."""
    scenario = cluster.scenario
    context = workload.context_tokens
    roofline = platform_profile(
        cluster.model, cluster.gpu, scenario.tp, context_tokens=context, most_sequences=max(2, min(256, workload.batch))
    )
    room = float(cluster.limits.kv_tokens)
    # Where prompts are rewritten, little of what is kept is found again; 0 means without bound.
    kept = 0.0 if cluster.parameters.engine.kv_store else max(1.0, room * cluster.workload.stable_fraction)
    roofline = replace(roofline, kv_capacity_bytes=room * cluster.kv_bytes, prefix_capacity_tokens=kept)
    if scenario.policy.prior == "roofline":
        return roofline
    costs, links = cluster.costs, cluster.parameters.links
    decode = [DecodeSample(n, 32, costs.decode_curve(n).run_s(context, 32)) for n in (1, 2, 4, 8, 12, 16, 24, 32)]
    tokens = max(1, round(workload.new_prompt_tokens))
    prefill = []
    # A worker with attention ranks is at its speed when all of them have prompts.
    ranks = cluster.parameters.engine.attention_ranks
    for requests in (ranks, 2 * ranks, 4 * ranks):
        chunk = min(tokens, max(1, cluster.limits.chunk_tokens // requests))
        past = max(0, round(context) - chunk)
        seconds = costs.prefill_s([(chunk, past)] * requests, requests)
        prefill += [PrefillSample(chunk * requests, seconds, requests)] * 8
    rate = links.bytes_per_s_per_gpu * scenario.tp
    transfer = [
        TransferSample(n, int(n * cluster.kv_bytes), n * cluster.kv_bytes / rate + links.latency_s)
        for n in (256, 512, 1024, 2048, 4096, 8192)
        for _ in range(4)
    ]
    return fit_platform(decode=decode, prefill=prefill, transfer=transfer, prior=roofline).profile

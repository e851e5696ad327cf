"""Whether the mode that the cost models choose for reference and actor is the faster one when both are run.

    python integration/benchmarks/bench_ref_actor.py --json

Reference and actor are small torch models on threads, one a rank; as on the local runtime, each pass is real and lasts
at least what a stated device would need. Micro-batches become ready by RAS and TPRM; both modes run each case, and the
choice is compared with what was measured (TideRL section 5.1 and appendix A).
"""

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from pearl_planner.ref_actor import MicroBatchCosts, RefActorMode, TrainerShape, arrivals, choose_mode

SHAPE = TrainerShape(ranks=3, aggregate=2)
MICRO_BATCHES = 9


class Models:
    """A reference and an actor whose passes are real and paced."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)

        def network() -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))

        self._torch = torch
        self._reference = network().requires_grad_(False)
        self._actors = [network() for _ in range(SHAPE.ranks)]
        self._rows = torch.randn(32, 64)

    def reference(self) -> object:
        """What the loss needs of the reference."""
        with self._torch.no_grad():
            return self._reference(self._rows).log_softmax(-1)

    def forward(self, rank: int) -> object:
        """The actor's forward, without the loss."""
        return self._actors[rank](self._rows).log_softmax(-1)

    def backward(self, scores, reference) -> None:
        """The loss with its KL term, and its gradients."""
        difference = reference - scores
        (self._torch.expm1(difference) - difference - 0.1 * scores).mean().backward()


def pause(seconds: float) -> None:
    """Let this thread, and only it, wait."""
    if seconds > 0:
        threading.Event().wait(seconds)


def paced(seconds: float, work: Callable[[], object]) -> object:
    """Do `work`, in no less than `seconds`."""
    until_s = time.monotonic() + seconds
    made = work()
    pause(until_s - time.monotonic())
    return made


def wait_until(at_s: float) -> None:
    """Pause until that time."""
    pause(at_s - time.monotonic())


def decoupled(models: Models, ready_s: Sequence[float], costs: MicroBatchCosts) -> float:
    """One rank streams the reference, the others take micro-batches as they are free. Returns seconds."""
    began_s = time.monotonic()
    scored = [threading.Event() for _ in ready_s]
    results: list[object] = [None] * len(ready_s)
    numbers = iter(range(len(ready_s)))
    lock = threading.Lock()

    def stream() -> None:
        for number, at_s in enumerate(ready_s):
            wait_until(began_s + at_s)
            results[number] = paced(costs.ref_forward_s, models.reference)
            scored[number].set()

    def act(rank: int) -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            wait_until(began_s + ready_s[number])
            scores = paced(costs.actor_forward_s, lambda: models.forward(rank))
            scored[number].wait()
            paced(costs.actor_backward_s, lambda: models.backward(scores, results[number]))  # noqa: B023

    with ThreadPoolExecutor(SHAPE.ranks) as pool:
        for future in [pool.submit(stream), *(pool.submit(act, rank) for rank in range(SHAPE.ranks - 1))]:
            future.result()
    return time.monotonic() - began_s


def colocated(models: Models, ready_s: Sequence[float], costs: MicroBatchCosts) -> float:
    """All ranks swap together, and share what is ready. Returns seconds."""
    began_s = time.monotonic()
    done, most = 0, SHAPE.aggregate * SHAPE.ranks
    with ThreadPoolExecutor(SHAPE.ranks) as pool:
        while done < len(ready_s):
            wait_until(began_s + ready_s[done])
            now_s = time.monotonic() - began_s
            taken = [n for n in range(done, min(done + most, len(ready_s))) if ready_s[n] <= max(now_s, ready_s[done])]
            shares = [taken[rank :: SHAPE.ranks] for rank in range(SHAPE.ranks)]
            pause(costs.swap_s)

            def score(share: Sequence[int]) -> list[object]:
                return [paced(costs.ref_forward_s, models.reference) for _ in share]

            references = list(pool.map(score, shares))
            pause(costs.swap_s)

            def act(rank: int, references: list[list[object]] = references) -> None:
                for reference in references[rank]:
                    scores = paced(costs.actor_forward_s, lambda: models.forward(rank))
                    paced(costs.actor_backward_s, lambda: models.backward(scores, reference))  # noqa: B023

            list(pool.map(act, range(SHAPE.ranks)))
            done += len(taken)
    return time.monotonic() - began_s


def sweep(unit_s: float) -> list[dict[str, object]]:
    """Every case of RAS × TPRM × swap cost, chosen and measured."""
    models = Models()
    cases = []
    for swap in (0.5, 2.0):
        costs = MicroBatchCosts(
            ref_forward_s=unit_s, actor_forward_s=unit_s, actor_backward_s=2 * unit_s, swap_s=swap * unit_s
        )
        for ras in (0, 3, 6, 9):
            for tprm in (0.5, 1.5, 4.0):
                ready = arrivals(MICRO_BATCHES, ras=ras, tprm_s=tprm * unit_s)
                choice = choose_mode(ready, costs, SHAPE)
                apart, together = decoupled(models, ready, costs), colocated(models, ready, costs)
                faster = RefActorMode.DECOUPLED if apart < together else RefActorMode.COLOCATED
                cases.append(
                    {
                        "ras": ras,
                        "tprm": tprm,
                        "swap": swap,
                        "chosen": str(choice.mode),
                        "faster": str(faster),
                        "decoupled_s": apart,
                        "colocated_s": together,
                        "predicted_decoupled_s": choice.decoupled_s,
                        "predicted_colocated_s": choice.colocated_s,
                    }
                )
    return cases


def main() -> None:
    """Print each case, and in how many the choice was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--unit", type=float, default=0.04, help="seconds of a forward pass on the stated device")
    arguments = parser.parse_args()
    cases = sweep(arguments.unit)
    right = sum(case["chosen"] == case["faster"] for case in cases) / len(cases)
    if arguments.json:
        print(json.dumps({"right": right, "cases": cases}))
        return
    for case in cases:
        print(
            f"RAS {case['ras']}  TPRM {case['tprm']}  swap {case['swap']}  chosen {case['chosen']:9}  "
            f"decoupled {case['decoupled_s']:.3f} s ({case['predicted_decoupled_s']:.3f})  "
            f"colocated {case['colocated_s']:.3f} s ({case['predicted_colocated_s']:.3f})"
        )
    print(f"right in {right:.0%} of {len(cases)} cases")


if __name__ == "__main__":
    main()

"""What runs inside a training rank's process: one loop that answers the control plane's calls, one at a time.

Preload this module in the fork server: it brings torch, FSDP and transformers.
"""

import os
import selectors
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from pearl_executor.runtimes.local.frames import Frame, FrameSocket, tcp_address
from pearl_rl.training.fsdp2 import FsdpTrainer, TrainingStateError, join_ranks, reference_rank
from pearl_rl.training.meeting import LOOPBACK, interface_of, open_store, reach_store
from pearl_rl.training.options import RefActor, TrainerOptions
from pearl_rl.training.ref_actor import ReferenceRank, TimedReference
from pearl_rl.training.shards import decode_shard, split_shards
from pearl_rl.training.stopwatch import Stopwatch
from pearl_rl.training.tiny_model import Example, TinyShape, WarmUp, build_tiny_model

Answer = dict[str, Any]


class Rank:
    """The calls that a rank answers. All but `stop` are collectives: every rank gets each, in the same order."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._rank = int(arguments["rank"])
        self._ranks = int(arguments["ranks"])
        self._rendezvous = Path(arguments["rendezvous"])
        self._listen = str(arguments["listen"])
        self._store: Store | None = None
        self._folder = Path(arguments["folder"])
        self._options = TrainerOptions.from_json(arguments["options"])
        self._collective_timeout_s = float(arguments["collective_timeout_s"])
        self._trainer: FsdpTrainer | None = None
        self._reference: ReferenceRank | None = None
        self.calls: dict[str, Callable[[Frame], Answer]] = {
            "meet": self._meet,
            "start": self._start,
            "update": self._update,
            "write_weights": self._write_weights,
            "save": self._save,
            "load": self._load,
            "release": self._release,
            "resume": self._resume,
        }

    def _meet(self, frame: Frame) -> Answer:
        """Where all ranks meet: a store of rank 0, or an empty address for the file that all of them see."""
        del frame
        if self._rank or tcp_address(self._listen) is None:
            return {"store": ""}
        self._store, address = open_store(self._listen, self._ranks, self._collective_timeout_s)
        return {"store": address}

    def _start(self, frame: Frame) -> Answer:
        timeout_s = self._collective_timeout_s
        if self._store is None and frame.head["store"]:
            self._store = reach_store(frame.head["store"], self._ranks, timeout_s)
        meeting = self._rendezvous if self._store is None else self._store
        mesh = join_ranks(self._rank, self._ranks, meeting, self._options.device, timeout_s)
        spill = self._folder / f"parked-rank{self._rank:05d}"
        if self._options.reference_rank:
            # A collective of all ranks, the reference's included.
            mesh = DeviceMesh(self._options.device, list(range(self._ranks - 1)))
            if self._rank == self._ranks - 1:
                self._reference = reference_rank(Path(frame.head["model_path"]), self._options, spill)
                return {"parameters": self._reference.parameters}
        model, weights = Path(frame.head["model_path"]), Path(frame.head["weights_path"])
        self._trainer = FsdpTrainer(model, self._options, mesh, spill, weights)
        return {"parameters": self._trainer.parameters}

    def _update(self, frame: Frame) -> Answer:
        device = self._options.device
        if self._reference is not None:
            shares = [decode_shard(head, body, device) for head, body in split_shards(frame.head, frame.body)]
            decoupled = frame.head["ref_actor"] == RefActor.DECOUPLED
            scoring = Stopwatch(device) if "timed" in frame.head else None
            scored = self._reference.serve(shares, self._options.epochs, scoring) if decoupled else 0
            times = {} if scoring is None else {"times": {"scoring_s": scoring.seconds}}
            return {"scored": scored, **times}
        trainer = self._held()
        if "timed" in frame.head:
            return self._timed_update(trainer, frame)
        references = trainer.references(RefActor(frame.head["ref_actor"]))
        return {"sums": trainer.update(decode_shard(frame.head, frame.body, device), references)}

    def _timed_update(self, trainer: FsdpTrainer, frame: Frame) -> Answer:
        """An update, and how long it took, with its scoring and all that the actor waited for of the reference."""
        device = self._options.device
        update, scoring, asking = Stopwatch(device), Stopwatch(device), Stopwatch(device)
        shard = decode_shard(frame.head, frame.body, device)
        with update:
            references = trainer.references(RefActor(frame.head["ref_actor"]), scoring)
            sums = trainer.update(shard, TimedReference(references, asking))
        times = {"update_s": update.seconds, "scoring_s": scoring.seconds, "asking_s": asking.seconds}
        return {"sums": sums, "times": times}

    def _write_weights(self, frame: Frame) -> Answer:
        if self._reference is not None:
            return {}
        published = self._held().write_weights(Path(frame.head["folder"]))
        return {} if published is None else asdict(published)

    def _save(self, frame: Frame) -> Answer:
        if self._reference is not None:
            return {}
        trainer = self._held()
        trainer.save(Path(frame.head["folder"]))
        return {"optimizer_steps": trainer.optimizer_steps, "parameters": trainer.parameters}

    def _load(self, frame: Frame) -> Answer:
        if self._reference is not None:
            return {}
        head = frame.head
        self._held().load(
            Path(head["folder"]), int(head["optimizer_steps"]), int(head["parameters"]), bool(head["moments_only"])
        )
        return {}

    def _release(self, frame: Frame) -> Answer:
        del frame
        return asdict((self._reference or self._held()).release())

    def _resume(self, frame: Frame) -> Answer:
        del frame
        return asdict((self._reference or self._held()).resume())

    def _held(self) -> FsdpTrainer:
        if self._trainer is None:
            raise TrainingStateError("the rank is not started")
        return self._trainer


def rank_main(channel: FrameSocket, arguments: dict[str, Any]) -> None:
    """Target of a rank's process: serve until told to stop or until the control plane hangs up."""
    # gloo looks the host's name up otherwise, which fails on a machine without a network.
    interface = interface_of(str(arguments["listen"]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface != LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    torch.set_num_threads(int(arguments["threads"]))
    serve(channel, Rank(arguments).calls)
    # Not destroy_process_group: it may wait for ranks that are gone, and the process ends now.
    dist.group.WORLD = None


def serve(channel: FrameSocket, calls: dict[str, Callable[[Frame], Answer]]) -> None:
    """Answer calls by name until `stop` or the end of the connection. An exception is an answer, and is logged."""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while not channel.closed:
            selector.select()
            for frame in channel.receive():
                number = frame.head["call"]
                if frame.head["op"] == "stop":
                    channel.send({"re": number})
                    return
                channel.send({"re": number, **_answer(calls, frame)})
                channel.drain(60.0)


def _answer(calls: dict[str, Callable[[Frame], Answer]], frame: Frame) -> Answer:
    try:
        return calls[frame.head["op"]](frame)
    except Exception as error:
        # To the log with its trace; the control plane gets one line and ends the ranks.
        traceback.print_exc()
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return {"error": type(error).__name__, "message": first_line}


def build_main(channel: FrameSocket, arguments: dict[str, Any]) -> None:
    """Target of the process that builds a tiny model: one call `build`, then the end."""
    torch.set_num_threads(int(arguments["threads"]))

    def build(frame: Frame) -> Answer:
        head = frame.head
        warm_up = head["warm_up"]
        if warm_up is not None:
            examples = tuple(Example(tuple(tokens), tuple(map(bool, mask))) for tokens, mask in warm_up.pop("examples"))
            warm_up = WarmUp(examples=examples, **warm_up)
        return {"parameters": build_tiny_model(Path(head["folder"]), TinyShape(**head["shape"]), head["seed"], warm_up)}

    serve(channel, {"build": build})

"""Settings of what the job runs on: engine, cluster, availability, emulated device, planner, and time limits."""

from typing import Annotated, Literal

from pydantic import Field

from pearl_rl.settings.job import Section
from pearl_rl.settings.names import named_policy


class SglangSettings(Section):
    """`[engine.sglang]`: SGLang servers as workers, where `engine.kind = "sglang"`."""

    interpreter: list[str] = Field(
        description='command of a Python that has SGLang 0.5.23, or of a container\'s: ["/opt/sglang/bin/python"]; '
        "{name} and {gpus} stand for the worker's name and GPUs"
    )
    kill_command: list[str] = Field(description="command that ends a container after its client was killed")
    host: str = Field(min_length=1, description="IP address that servers listen on and are reached at")
    open_ports: bool = Field(
        description="whether a server may listen on addresses other than loopback and host; else it is ended for it"
    )
    memory_fraction: float = Field(ge=0, lt=1, description="part of a GPU for weights and KV; 0 leaves it to SGLang")
    transfer_backend: Literal["mooncake", "mooncake_tcp"] = Field(description="KV hand-over: over RDMA, or over TCP")
    load_format: Literal["auto", "dummy"] = Field(
        description="what a server loads first; dummy skips it, since new weights follow before it serves"
    )
    weights: Literal["disk", "tensor", "ipc", "distributed"] = Field(
        description="way of new weights: the snapshot's folder, shared memory (tensor by tensor, or one buffer for "
        "checkpoint-engine), or a collective group"
    )
    gateway: str = Field(
        pattern=r"^(https?://[^\s/]+/?)?$",
        description="address of an SGLang gateway whose list of workers follows those that serve, for other clients; "
        "empty for none",
    )
    gated: bool = Field(description="start the servers of training GPUs early and hold them before they take memory")
    silence_s: float = Field(gt=0, description="a server without an answer for so long counts as hung, seconds")
    extra_args: list[str] = Field(description="more arguments of SGLang's command line")
    variables: list[str] = Field(description="more environment variables, each NAME=VALUE")


class EngineSettings(Section):
    """`[engine]`: the inference engine of one rollout worker."""

    kind: Literal["torch", "sglang"] = Field(description="engine that workers run: the embedded one, or SGLang")
    device: Literal["cpu", "cuda"] = Field(description="what engines and training compute on")
    max_running: int = Field(ge=1, le=100_000, description="requests in prefill or decode at a time on one worker")
    kv_tokens: int = Field(
        ge=16, description="tokens whose KV one worker holds, of requests and kept prefixes together"
    )
    prefill_chunk_tokens: int = Field(ge=1, description="most prompt tokens of one prefill iteration")
    threads: int = Field(ge=1, le=1_024, description="CPU threads of one worker's embedded engine")
    sglang: SglangSettings = Field(description='SGLang servers, where kind = "sglang"')


class RaySettings(Section):
    """`[cluster.ray]`: the Ray cluster of `cluster.runtime = "ray"`."""

    address: str = Field(description='cluster to connect to (host:port or "auto"); empty starts one on this machine')
    start_s: float = Field(gt=0, description="placing and starting one process on the cluster, seconds")
    node_silence_s: float = Field(gt=0, description="a node that gives no sign of life for so long is lost, seconds")
    notices: Literal["none", "aws", "gcp", "azure", "kubernetes"] = Field(
        description='whose preemption notices each preemptible node listens to, where availability.source = "ray"'
    )
    training_labels: str = Field(description="node labels for training GPUs, like pearl.zone=training; empty for any")
    reserved_labels: str = Field(description="node labels for reserved rollout GPUs; empty for any")
    preemptible_labels: str = Field(description="node labels for preemptible GPUs; empty for any")


class ClusterSettings(Section):
    """`[cluster]`: logical GPUs, and who may use them."""

    runtime: Literal["local", "ray"] = Field(description="where processes live: on this machine, or on a Ray cluster")
    training_gpus: int = Field(ge=1, le=1_000_000, description="GPUs of the training pool (the overlap zone)")
    reserved_rollout_gpus: int = Field(ge=0, le=1_000_000, description="GPUs that rollout keeps for the whole run")
    max_preemptible_gpus: int = Field(ge=0, le=1_000_000, description="most GPUs that come and go")
    gpus_per_worker: int = Field(ge=1, le=1_024, description="GPUs of one rollout worker (tensor parallelism)")
    borrowing: Literal["off", "ungated", "gated"] = Field(
        description="use of idle training GPUs: never, always, or where the gate of PEARL eq. (7) predicts a gain"
    )
    max_restarts: int = Field(
        ge=0, le=1_000_000, description="failures of a worker slot, or of training ranks, before it is given up"
    )
    min_healthy: int = Field(
        ge=0, le=1_000_000, description="worker slots that are kept however often they fail; 0 ends a run without any"
    )
    expansion_workers: int = Field(
        ge=1,
        le=1_000_000,
        description="workers of an expansion that are prepared together and serve together; where such groups fail, "
        "smaller ones are tried",
    )
    ray: RaySettings = Field(description='the cluster, where runtime = "ray"')


class AvailabilitySettings(Section):
    """`[availability]`: when preemptible GPUs come and go."""

    source: Literal["trace", "fixed", "control", "ray", "aws", "gcp", "azure", "kubernetes", "slurm"] = Field(
        description=(
            "replay a trace, keep max_preemptible_gpus all the time, follow a person's control file, offer the Ray "
            "nodes that carry cluster.ray.preemptible_labels as they join, drain and are lost, or offer this "
            "machine's until its provider gives notice (aws, gcp, azure, kubernetes, slurm)"
        )
    )
    trace: str = Field(description="trace to replay: a bundled name or a CSV file")
    segment: str = Field(description="segment of the trace; empty for the whole file")
    time_scale: float = Field(gt=0, description="trace seconds that pass in one second of the run")
    start_s: float = Field(ge=0, description="where in the segment the replay begins, trace seconds")
    notice_s: float = Field(ge=0, description="time between a reclaim's announcement and the GPU's loss, seconds")
    metadata_url: str = Field(description="address of the provider's local service; empty for the usual one")
    control_file: str = Field(description='file that people write to when source = "control"')
    seed: int = Field(ge=0, lt=2**32, description="seed of which GPU goes when the trace only says how many")


class DeviceSettings(Section):
    """`[device]`: the emulated device that each worker is paced to. The planner is not told these values."""

    paced: bool = Field(description="hold each engine to the costs below; false lets it run as fast as it can")
    decode_fixed_s: float = Field(ge=0, description="A: fixed cost of a decode iteration, seconds")
    decode_per_sequence_s: float = Field(
        ge=0, description="b: cost of one more sequence in a decode iteration, seconds"
    )
    prefill_per_token_s: float = Field(ge=0, description="t_prefill: cost of one prompt token, seconds")
    phase_switch_s: float = Field(
        ge=0, description="cost of changing between prefill and decode on one worker, seconds"
    )
    kv_bytes_per_s: float = Field(ge=0, description="BW: bandwidth of a KV hand-over, bytes per second; 0 is unlimited")
    handover_s: float = Field(ge=0, description="fixed cost of one KV hand-over, seconds")
    start_s: float = Field(ge=0, description="least time of starting a worker process, seconds")
    resume_s: float = Field(ge=0, description="least time of taking device memory again, seconds")
    release_s: float = Field(ge=0, description="least time of giving device memory back, seconds")
    switch_s: float = Field(ge=0, description="least time of changing a worker's role, seconds")
    load_s: float = Field(ge=0, description="least time of loading a weight snapshot, seconds")
    training_update_s: float = Field(ge=0, description="least time of one training update, seconds")


_POLICIES = (
    "pearl",
    "colocated_elastic",
    "static_pd",
    "pinned",
    "fixed",
    "prorsa",
    "pearl+prorsa",
    "tiderl",
    "pearl+tiderl",
    "pearl+prorsa+tiderl",
)


class PlannerSettings(Section):
    """`[planner]`: how configurations are chosen."""

    policy: Annotated[str, named_policy(*_POLICIES)] = Field(
        description=(
            "who chooses: the model (pearl), colocation only with preemptible GPUs, one ratio with preemptible GPUs, "
            "a person's ratio with borrowing too (pinned), reserved GPUs only, forecasts that switch roles inside a "
            "step (prorsa, and pearl+prorsa with the model's mode and borrowing), reserved GPUs with continuous "
            "injection, task batching and readiness (tiderl, or any of the two with +tiderl), or one of your own, "
            "module:attribute"
        )
    )
    configuration: str = Field(
        description="configuration, like 2P3D or 4C, that static_pd and pinned need and fixed may have; empty otherwise"
    )
    model: Literal["extended", "printed"] = Field(
        description="makespan model that decides: eqs (1)-(3) as printed, or extended by what they lack"
    )
    ratio_threshold: float = Field(ge=0, lt=1, description="relative gain that a change within one mode needs")
    mode_threshold: float = Field(ge=0, lt=1, description="relative gain that a change of the mode needs")
    prefill_load_limit: float = Field(gt=0, description="largest quotient of prefill path over decode path")
    kv_headroom: float = Field(gt=0, description="factor on a trajectory's KV in the capacity constraint")
    readiness: Literal["auto", "on", "off"] = Field(
        description="whether how ready the data is at each update says if training GPUs are lent; auto: for policies "
        "with tiderl"
    )
    horizon_s: float = Field(gt=0, description="how far a forecast of prorsa looks ahead, and how often it is made")
    flip_s: float = Field(ge=0, description="prior: prefill to decode or back in place, seconds")
    relaunch_s: float = Field(ge=0, description="prior: change between colocation and disaggregation, seconds")
    new_worker_s: float = Field(ge=0, description="prior: admission of new workers, seconds")
    activation_s: float = Field(ge=0, description="prior: borrowing training GPUs, seconds")
    deactivation_s: float = Field(ge=0, description="prior: returning them, seconds")
    ema_weight: float = Field(gt=0, le=1, description="weight of the newest observation in moving averages")


class ExecutorLimitSettings(Section):
    """`[limits.executor]`: how long carrying a plan out may wait, seconds; each for one call on one worker."""

    start_s: float = Field(gt=0, description="process start and engine construction")
    load_s: float = Field(gt=0, description="loading a snapshot while a worker is being prepared")
    sync_s: float = Field(gt=0, description="loading a snapshot on a worker that serves or is about to")
    drain_s: float = Field(gt=0, description="letting requests finish on a worker that leaves, if its deadline allows")
    interrupt_s: float = Field(gt=0, description="ending all requests of a worker with their partial tokens")
    interrupt_again_s: float = Field(gt=0, description="a worker that is not idle by then is interrupted again")
    idle_s: float = Field(gt=0, description="from the first interruption until the engine is idle")
    release_s: float = Field(gt=0, description="giving device memory back")
    resume_s: float = Field(gt=0, description="taking device memory again")
    switch_s: float = Field(gt=0, description="changing the role of an idle engine")
    refresh_s: float = Field(gt=0, description="renewing what peers know of a worker's KV buffers")
    probe_s: float = Field(gt=0, description="answering just before a group is declared ready")
    stop_s: float = Field(gt=0, description="ending a process in order")
    kill_s: float = Field(gt=0, description="ending a process for certain; this much of a deadline is kept for it")
    retry_s: float = Field(gt=0, description="pause before a failed kill or resume is tried again; doubles each time")
    retry_max_s: float = Field(gt=0, description="longest such pause")
    cancel_s: float = Field(gt=0, description="how long a call may take to end once it is cancelled")
    settle_s: float = Field(gt=0, description="how long a cancelled borrow waits for a resume under way")
    training_release_s: float = Field(gt=0, description="training giving its device memory back")
    training_resume_s: float = Field(gt=0, description="training taking its device memory again")


class RolloutLimitSettings(Section):
    """`[limits.rollout]`: how long rollout may wait, seconds."""

    no_worker_s: float = Field(gt=0, description="a model call waiting for somebody to serve it")
    stall_s: float = Field(gt=0, description="an attempt bringing no token")
    environment_s: float = Field(gt=0, description="one answer of the environment")
    batch_s: float = Field(gt=0, description="one batch")


class TrainingLimitSettings(Section):
    """`[limits.training]`: how long training may take or wait, seconds."""

    start_s: float = Field(gt=0, description="starting all ranks on the model")
    update_s: float = Field(gt=0, description="one update")
    checkpoint_s: float = Field(gt=0, description="writing or reading a checkpoint")
    memory_s: float = Field(gt=0, description="a release or a resume of the ranks' device memory")
    grant_s: float = Field(gt=0, description="training waiting for its GPUs before the run fails")
    return_s: float = Field(gt=0, description="borrowed GPUs coming back before what holds them is killed")


class LimitSettings(Section):
    """`[limits]`: the bound of each wait. Its expiry is a failure that names who did not answer."""

    executor: ExecutorLimitSettings = Field(description="carrying plans out")
    rollout: RolloutLimitSettings = Field(description="generating trajectories")
    training: TrainingLimitSettings = Field(description="updates and the hand-over of training GPUs")

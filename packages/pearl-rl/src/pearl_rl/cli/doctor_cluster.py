"""`pearl-rl doctor --cluster`: does a Ray cluster have what a job's settings ask for, node by node?"""

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pearl_executor.engines.sglang.options import INSTALL, VERSION
from pearl_executor.runtimes.local.processes import ProcessError
from pearl_rl.cli.doctor import Finding, tell
from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.preflight import check_installed
from pearl_rl.settings import Settings, load_settings
from pearl_rl.settings.labels import parse_labels

if TYPE_CHECKING:
    from pearl_executor.runtimes.ray.survey import NodeFacts

_AGAIN_S: Final = 5.0


def examine_cluster(
    config: Path, overrides: Sequence[str], *, address: str | None, wait_s: float, as_json: bool
) -> ExitCode:
    """Print what the cluster has and lacks for the job of `config`; asks again for up to `wait_s` seconds.

    The exit code says whether the job can run. Raises `CommandError` where there is no cluster.
    """
    chosen = [*overrides, "cluster.runtime=ray", *([f"cluster.ray.address={address}"] if address is not None else [])]
    settings = load_settings(config, chosen).settings
    check_installed(settings)
    try:
        findings = asyncio.run(_until_found(settings, wait_s))
    except ProcessError as error:
        raise CommandError(str(error)) from error
    return tell(findings, "this job on the cluster", as_json=as_json)


async def _until_found(settings: Settings, wait_s: float) -> list[Finding]:
    from pearl_executor.runtimes.ray.cluster import RayCluster
    from pearl_executor.runtimes.ray.survey import Questions, survey

    loop = asyncio.get_running_loop()
    until_s = loop.time() + wait_s
    async with RayCluster(settings.cluster.ray.address, namespace="pearl", gpus=_needed_gpus(settings)) as connection:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), connection.host, 0)
        marker = _marker(Path(settings.run.dir))
        try:
            sglang = settings.engine.kind == "sglang"
            questions = Questions(
                paths=(str(marker), *([] if settings.model.path == "tiny" else [settings.model.path])),
                interpreter=tuple(settings.engine.sglang.interpreter) if sglang else (),
                listener=(connection.host, server.sockets[0].getsockname()[1]),
            )
            while True:
                findings = list(compare(settings, await survey(questions), str(marker)))
                if all(finding.ok or not finding.needed for finding in findings) or loop.time() >= until_s:
                    return findings
                await asyncio.sleep(_AGAIN_S)
        finally:
            server.close()
            with suppress(OSError):
                marker.unlink()


def _needed_gpus(settings: Settings) -> int:
    return settings.cluster.training_gpus + settings.cluster.reserved_rollout_gpus


def _marker(folder: Path) -> Path:
    """A file in the run folder's place: a node that sees it shares that file system."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder.absolute() / f".pearl-doctor-{secrets.token_hex(4)}"
    marker.touch()
    return marker


def compare(settings: Settings, nodes: "Sequence[NodeFacts]", marker: str = "") -> Iterator[Finding]:
    """What `settings` need of `nodes`, and whether it is there. `marker` is a file in the run folder's place."""
    yield from _zones(settings, nodes)
    for node in nodes:
        yield from _node(settings, node, marker)


def _zones(settings: Settings, nodes: "Sequence[NodeFacts]") -> Iterator[Finding]:
    cluster = settings.cluster
    size = cluster.gpus_per_worker
    wanted = {
        "training": (cluster.training_gpus, cluster.ray.training_labels, size if cluster.borrowing != "off" else 1),
        "reserved": (cluster.reserved_rollout_gpus, cluster.ray.reserved_labels, size),
        "preemptible": (cluster.max_preemptible_gpus, cluster.ray.preemptible_labels, size),
    }
    for zone, (gpus, labels, together) in wanted.items():
        fitting = [node for node in nodes if _matches(node.labels, parse_labels(labels))]
        usable = sum(node.gpus // together * together for node in fitting)
        where = f"nodes labelled {labels}" if labels else "any node"
        detail = f"{usable} GPUs in {together}s on {len(fitting)} of {where}; {gpus} wanted"
        needed = zone != "preemptible" and gpus > 0
        remedy = f"start nodes with `ray start --labels {labels or 'any'}`, or lower cluster.{_SETTING[zone]}"
        yield Finding(f"{zone} GPUs", usable >= gpus, detail, needed, "" if usable >= gpus else remedy)


_SETTING: Final = {
    "training": "training_gpus",
    "reserved": "reserved_rollout_gpus",
    "preemptible": "max_preemptible_gpus",
}


def _matches(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def _node(settings: Settings, node: "NodeFacts", marker: str) -> Iterator[Finding]:
    name = f"node {node.host}" + (f" ({node.labels['pearl.zone']})" if "pearl.zone" in node.labels else "")
    if node.error:
        yield Finding(name, False, f"does not answer: {node.error}", True, "is the project installed there?")
        return
    problems = list(_problems(settings, node, marker))
    detail = f"Python {node.python}, Ray {node.ray}, {node.gpus} GPUs"
    if not problems:
        yield Finding(name, True, detail, True)
    for text, remedy in problems:
        yield Finding(name, False, f"{detail}: {text}", True, remedy)


def _problems(settings: Settings, node: "NodeFacts", marker: str) -> Iterator[tuple[str, str]]:
    """What is wrong with a node, and what to do."""
    if node.ray != version("ray"):
        yield f"another Ray than here ({version('ray')})", "install the same version everywhere"
    if node.pearl != version("pearl-executor"):
        yield f"another pearl-executor than here ({node.pearl})", "run `uv sync --group ray` there"
    if not node.reaches_driver:
        yield "cannot connect to the driver", "open the network between the nodes"
    training = _matches(node.labels, parse_labels(settings.cluster.ray.training_labels)) and node.gpus > 0
    if training and marker in node.missing:
        yield (
            f"does not share run.dir = {settings.run.dir}",
            "set run.dir to a file system that all training nodes share",
        )
    if settings.model.path in node.missing and node.gpus > 0:
        yield f"has no model.path = {settings.model.path}", "copy or mount the model there"
    if settings.engine.kind != "sglang" or node.gpus == 0:
        return
    if node.sglang != VERSION:
        found = f"SGLang {node.sglang}, not {VERSION}" if node.sglang[:1].isdigit() else node.sglang
        yield f"engine.sglang.interpreter: {found}", INSTALL
    elif node.transfer:
        yield (
            f"SGLang cannot hand KV over: {node.transfer}",
            "install mooncake-transfer-engine beside SGLang, and the system's libibverbs1",
        )

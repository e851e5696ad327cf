"""Preemption notices against local endpoints that answer as the providers' pages say."""

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pearl_executor.preemption.kubernetes import LEAVING_TAINTS, KubernetesNode
from pearl_executor.preemption.metadata import AwsSpot, AzureSpot, GcpSpot
from pearl_executor.preemption.notice import Notice, NoticedGpus
from pearl_executor.preemption.slurm import SlurmSignal
from pearl_executor.preemption.sources import NOTICE_KINDS, notice_source
from pearl_executor.virtual_time import run_virtual
from pearl_state.events import GpusOffered, GpusReclaimed
from pearl_state.worker import GpuId

NOON = 1_505_736_000.0  # 2017-09-18T12:00:00Z


class Endpoint:
    """A provider's local service: each path answers with what is next in its list, the last one for ever."""

    def __init__(self, paths, need=None, token=None):
        endpoint = self
        self.asked = deque(maxlen=1000)
        self.paths = {path: deque(answers) for path, answers in paths.items()}

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self):
                self.answer()

            def do_GET(self):
                self.answer()

            def answer(self):
                endpoint.asked.append((self.command, self.path, dict(self.headers)))
                status, body = endpoint.reply(self.command, self.path, self.headers, need, token)
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def reply(self, command, path, headers, need, token):
        if command == "PUT":
            fits = path == "/latest/api/token" and headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
            return (200, token) if fits else (400, "")
        if need is not None and headers.get(need[0]) != need[1]:
            return 401 if token or need[0] == "Authorization" else 403, ""
        answers = self.paths.get(path.partition("?")[0])
        if not answers:
            return 404, ""
        return answers[0] if len(answers) == 1 else answers.popleft()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(paths, **options):
            endpoint = Endpoint(paths, **options)
            stack.callback(endpoint.close)
            return endpoint

        yield start


def first(source, count=1, within_s=20.0):
    async def follow():
        found = []
        async with asyncio.timeout(within_s), contextlib.aclosing(source.notices()) as notices:
            async for notice in notices:
                found.append(notice)
                if len(found) == count:
                    break
        return found

    return asyncio.run(follow())


def test_aws_tells_the_action_and_its_time_with_a_session_token(serve):
    action = {"action": "terminate", "time": "2017-09-18T12:02:00Z"}
    endpoint = serve(
        {"/latest/meta-data/spot/instance-action": [(404, ""), (200, action)]},
        need=("X-aws-ec2-metadata-token", "TOKEN=="),
        token="TOKEN==",
    )
    (notice,) = first(AwsSpot(endpoint.url, poll_s=0.01, clock=lambda: NOON))
    assert notice == Notice(120.0, "EC2 will terminate this Spot instance at 2017-09-18T12:02:00Z")
    assert [entry[0] for entry in endpoint.asked].count("PUT") == 1


@pytest.mark.parametrize(
    ("action", "left_s"),
    [
        ({"action": "hibernate", "time": "2017-09-18T12:02:00Z"}, 0.0),
        ({"action": "stop", "time": "2017-09-18T11:00:00Z"}, 0.0),
        ({"action": "stop", "time": "soon"}, 0.0),
    ],
)
def test_aws_leaves_no_time_where_it_names_none(serve, action, left_s):
    endpoint = serve({"/latest/meta-data/spot/instance-action": [(200, action)]})
    assert first(AwsSpot(endpoint.url, clock=lambda: NOON))[0].leaves_in_s == left_s


def test_gcp_waits_at_the_service_until_the_machine_is_preempted(serve):
    path = "/computeMetadata/v1/instance/preempted"
    endpoint = serve({path: [(200, "FALSE"), (200, "FALSE"), (200, "TRUE")]}, need=("Metadata-Flavor", "Google"))
    assert first(GcpSpot(endpoint.url)) == [Notice(30.0, "Compute Engine preempts this machine")]
    assert [entry[1] for entry in endpoint.asked] == [path, *[f"{path}?wait_for_change=true&timeout_sec=60"] * 2]


def azure_event(id_, resources, kind="Preempt", status="Scheduled", before="Mon, 18 Sep 2017 12:00:40 GMT"):
    return {
        "EventId": id_,
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": resources,
        "EventStatus": status,
        "NotBefore": before,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


def test_azure_preempts_this_machine_only_and_may_withdraw(serve):
    other = [azure_event("A", ["vm_9"]), azure_event("B", ["vm_0"], kind="Reboot")]
    mine = azure_event("C", ["vm_0", "vm_1"])
    documents = [[], other, [*other, mine], [mine], [], [azure_event("D", ["vm_0"], status="Started", before="")]]
    endpoint = serve(
        {
            "/metadata/instance/compute/name": [(200, "vm_0")],
            "/metadata/scheduledevents": [
                (200, {"DocumentIncarnation": number, "Events": events}) for number, events in enumerate(documents)
            ],
        },
        need=("Metadata", "true"),
    )
    found = first(AzureSpot(endpoint.url, poll_s=0.01, clock=lambda: NOON), 3)
    assert [notice.leaves_in_s for notice in found] == [40.0, None, 0.0]
    assert "not before Mon, 18 Sep 2017 12:00:40 GMT" in found[0].reason


def test_kubernetes_tells_by_a_taint_and_lifts_it(serve, tmp_path):
    (tmp_path / "token").write_text("account-token\n")
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule", "timeAdded": "2017-09-18T12:00:00Z"}
    leaving = {"key": "aws-node-termination-handler/spot-itn", "value": "1505736000", "effect": "NoSchedule"}
    nodes = [{"kind": "Node", "spec": {"taints": taints}} for taints in ([cordon], [cordon, leaving], [cordon])]
    nodes.insert(0, {"kind": "Node", "spec": {}})
    endpoint = serve(
        {"/api/v1/nodes/gpu-7": [(200, node) for node in nodes]}, need=("Authorization", "Bearer account-token")
    )
    source = KubernetesNode(endpoint.url, node="gpu-7", pod="x", notice_s=20.0, poll_s=0.01, account=tmp_path)
    found = first(source, 2)
    assert [notice.leaves_in_s for notice in found] == [20.0, None]
    assert "aws-node-termination-handler/spot-itn" in found[0].reason
    assert not any("account-token" in notice.reason for notice in found)


def test_kubernetes_tells_when_the_pods_grace_period_is_over(serve, tmp_path):
    pod = {"metadata": {"name": "w", "deletionTimestamp": "2017-09-18T12:00:30Z", "deletionGracePeriodSeconds": 30}}
    endpoint = serve({"/api/v1/namespaces/ml/pods/w": [(200, {"metadata": {"name": "w"}}), (200, pod)]})
    source = KubernetesNode(endpoint.url, pod="ml/w", poll_s=0.01, account=tmp_path, clock=lambda: NOON)
    assert first(source) == [Notice(30.0, "pod ml/w is being deleted")]


def test_kubernetes_needs_to_know_where_it_is(monkeypatch):
    for name in ("NODE_NAME", "POD_NAME", "POD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="set NODE_NAME, or POD_NAMESPACE and POD_NAME"):
        KubernetesNode()
    assert "node.kubernetes.io/unschedulable" not in LEAVING_TAINTS


def test_a_service_that_does_not_answer_is_asked_again(serve):
    action = {"action": "stop", "time": "2017-09-18T12:02:00Z"}
    path = "/latest/meta-data/spot/instance-action"
    endpoint = serve({path: [(500, "oops"), (200, "no JSON"), (200, action)]})
    found = first(AwsSpot(endpoint.url, poll_s=0.01, clock=lambda: NOON), 2)
    assert found[-1].leaves_in_s == 120.0
    nobody = Endpoint({})
    nobody.close()
    with pytest.raises(TimeoutError):
        first(GcpSpot(nobody.url), within_s=0.3)


def test_slurm_tells_by_a_signal_and_gives_its_handler_back():
    async def main():
        async with contextlib.aclosing(SlurmSignal(notice_s=120.0).notices()) as notices:
            coming = asyncio.ensure_future(anext(notices))
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert await coming == Notice(120.0, "SLURM sent SIGUSR1")
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

    asyncio.run(main())


def test_sources_have_names_and_an_unknown_one_is_refused(monkeypatch):
    monkeypatch.setenv("NODE_NAME", "gpu-7")
    for kind in NOTICE_KINDS:
        assert notice_source(kind, notice_s=30.0, base="http://127.0.0.1:1") is not None
    with pytest.raises(ValueError, match="'oracle': there is no such source; use one of aws, gcp"):
        notice_source("oracle", notice_s=30.0)


class Scripted:
    """Notices at given times."""

    def __init__(self, *steps):
        self._steps = steps

    async def notices(self):
        for wait_s, leaves_in_s in self._steps:
            await asyncio.sleep(wait_s)
            yield Notice(leaves_in_s, "told so")


def test_a_notice_reclaims_every_gpu_of_the_machine_and_its_withdrawal_offers_them_again():
    async def main():
        source = NoticedGpus(Scripted((10.0, 30.0), (5.0, 20.0), (5.0, None)), gpus=[4, 5], node="here")
        loop = asyncio.get_running_loop()
        loop.call_later(25.0, source.returned, frozenset({GpuId(4), GpuId(5)}))
        return [(round(loop.time()), event) async for event in source.events()]

    (at, offer), (then, reclaim), (later, again) = run_virtual(main())
    assert isinstance(offer, GpusOffered)
    assert isinstance(reclaim, GpusReclaimed)
    assert isinstance(again, GpusOffered)
    assert offer.gpus == reclaim.gpus == again.gpus == {4, 5}
    assert (then - at, later - at) == (10, 25)
    assert reclaim.deadline_s - reclaim.now_s == 30.0

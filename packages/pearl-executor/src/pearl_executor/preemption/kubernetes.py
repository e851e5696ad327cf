"""Notices from Kubernetes: taints that say a node is about to go, and the deletion of the own pod.

https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/
https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination
"""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from pearl_executor.preemption.metadata import ask, json_object, left_s
from pearl_executor.preemption.notice import Notice, WallClock, wall_clock

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LEAVING_TAINTS: Final = frozenset(
    {
        # Kubernetes itself, the cluster autoscaler, Karpenter, GKE, and the handlers of AWS and Azure.
        "node.kubernetes.io/out-of-service",
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "kubernetes.azure.com/scalesetpriority-evicted",
    }
)
"""Keys of taints after which a node goes. A cordon alone is none: a cordoned node may stay for days."""


class KubernetesNode:
    """The node and the pod that this process runs in, asked of the API server by the pod's service account.

    It needs `get` on its node and its pod. `node` and `pod` (`namespace/name`) come from the downward API, by default
    in NODE_NAME, POD_NAMESPACE and POD_NAME. A taint leaves `notice_s` seconds; a pod's deletion says how many.
    """

    def __init__(
        self,
        base: str = "",
        *,
        node: str = "",
        pod: str = "",
        notice_s: float = 25.0,
        poll_s: float = 2.0,
        account: Path = _ACCOUNT,
        clock: WallClock = wall_clock,
    ) -> None:
        env = os.environ
        host, port = (
            env.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc"),
            env.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        self._base = base or f"https://{host}:{port}"
        self._node = node or env.get("NODE_NAME", "")
        self._pod = pod or "/".join(filter(None, (env.get("POD_NAMESPACE", ""), env.get("POD_NAME", ""))))
        if not self._node and "/" not in self._pod:
            raise ValueError(
                "Kubernetes notices need the name of the node or the pod; set NODE_NAME, or POD_NAMESPACE and POD_NAME,"
                " from the downward API"
            )
        self._notice_s = notice_s
        self._poll_s = poll_s
        self._account = account
        self._clock = clock

    async def notices(self) -> AsyncGenerator[Notice, None]:
        """One notice for each new reason to leave, and one that takes it back where a taint is lifted."""
        context = self._context()
        known: set[str] = set()
        while True:
            found: dict[str, float] = {}
            complete = True
            if self._node:
                node = await self._get(f"/api/v1/nodes/{self._node}", context)
                complete = node is not None
                found |= dict.fromkeys(_leaving(node or {}), self._notice_s)
            if "/" in self._pod:
                namespace, _, name = self._pod.partition("/")
                pod = await self._get(f"/api/v1/namespaces/{namespace}/pods/{name}", context)
                found |= self._deletion(pod or {})
            for reason in found.keys() - known:
                yield Notice(found[reason], reason)
            if known and not found and complete:
                yield Notice(None, f"{', '.join(sorted(known))}: not any more")
            known = set(found) if complete else known | found.keys()
            await asyncio.sleep(self._poll_s)

    def _deletion(self, pod: Mapping[str, Any]) -> dict[str, float]:
        """A pod that is being deleted names when its grace period is over."""
        stamp = (pod.get("metadata") or {}).get("deletionTimestamp")
        if not isinstance(stamp, str):
            return {}
        try:
            return {f"pod {self._pod} is being deleted": left_s(datetime.fromisoformat(stamp), self._clock)}
        except ValueError:
            return {f"pod {self._pod} is being deleted": 0.0}

    async def _get(self, path: str, context: ssl.SSLContext | None) -> dict[str, Any] | None:
        # The token is read anew each time: the kubelet rotates it.
        file = self._account / "token"
        token = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        answer = await ask(f"{self._base}{path}", headers, timeout_s=5.0, context=context)
        return json_object(answer.text) if answer is not None and answer.status == HTTPStatus.OK else None

    def _context(self) -> ssl.SSLContext | None:
        authority = self._account / "ca.crt"
        if not self._base.startswith("https"):
            return None
        return ssl.create_default_context(cafile=str(authority) if authority.is_file() else None)


def _leaving(node: Mapping[str, Any]) -> list[str]:
    """Why a node goes, by its taints."""
    taints = (node.get("spec") or {}).get("taints") or []
    keys = [str(taint.get("key")) for taint in taints if isinstance(taint, dict)]
    return [f"node is tainted {key}" for key in keys if key in LEAVING_TAINTS]

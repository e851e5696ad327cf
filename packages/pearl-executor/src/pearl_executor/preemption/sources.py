"""Notice sources by name, as settings give them."""

from typing import Literal, get_args

from pearl_executor.preemption.kubernetes import KubernetesNode
from pearl_executor.preemption.metadata import AwsSpot, AzureSpot, GcpSpot
from pearl_executor.preemption.notice import NoticeSource
from pearl_executor.preemption.slurm import SlurmSignal

NoticeKind = Literal["aws", "gcp", "azure", "kubernetes", "slurm"]
NOTICE_KINDS: tuple[str, ...] = get_args(NoticeKind)


def notice_source(kind: str, *, notice_s: float, base: str = "") -> NoticeSource:
    """The source called `kind`. `base` replaces the provider's address; `notice_s` counts where it gives no deadline.

    Raises `ValueError` for an unknown kind, and where a source lacks what it needs here.
    """
    if kind == "slurm":
        return SlurmSignal(notice_s=notice_s)
    if kind == "kubernetes":
        return KubernetesNode(base, notice_s=notice_s)
    if kind == "gcp":
        return GcpSpot(base, notice_s=notice_s) if base else GcpSpot(notice_s=notice_s)
    if kind == "aws":
        return AwsSpot(base) if base else AwsSpot()
    if kind == "azure":
        return AzureSpot(base) if base else AzureSpot()
    raise ValueError(f"notices from {kind!r}: there is no such source; use one of {', '.join(NOTICE_KINDS)}")

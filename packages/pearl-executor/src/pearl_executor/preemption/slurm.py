"""Notices from SLURM: a signal some time before the job's end or its preemption.

`sbatch --signal=B:USR1@120` sends SIGUSR1 to the batch script 120 seconds before the time limit, and with the cluster's
`PreemptParameters=send_user_signal` also when the job is preempted, `GraceTime` seconds before SIGKILL.
https://slurm.schedmd.com/sbatch.html#OPT_signal https://slurm.schedmd.com/preempt.html
"""

import asyncio
import signal
from collections.abc import AsyncGenerator

from pearl_executor.preemption.notice import Notice


class SlurmSignal:
    """The signal that this process gets; its script must pass it on (`srun`, or `exec`). `notice_s`: how long ahead."""

    def __init__(self, *, notice_s: float, number: signal.Signals = signal.SIGUSR1) -> None:
        self._notice_s = notice_s
        self._number = number

    async def notices(self) -> AsyncGenerator[Notice, None]:
        """One notice; the process must be its main thread's. Takes the signal's handler while it is followed."""
        loop = asyncio.get_running_loop()
        received = asyncio.Event()
        loop.add_signal_handler(self._number, received.set)
        try:
            await received.wait()
            yield Notice(self._notice_s, f"SLURM sent {self._number.name}")
        finally:
            loop.remove_signal_handler(self._number)

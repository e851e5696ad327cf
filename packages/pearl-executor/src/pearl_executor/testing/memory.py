"""A ledger of GPU memory: who holds how much of which GPU, and every time that two held one."""

from pearl_state.worker import GpuId


class GpuLedger:
    """Memory by GPU and owner. Two owners on one GPU are a violation, which is recorded and not forgiven."""

    def __init__(self) -> None:
        self._held: dict[GpuId, dict[str, int]] = {}
        self.violations: list[str] = []

    def take(self, gpus: frozenset[GpuId], owner: str, bytes_: int) -> None:
        """Let `owner` hold `bytes_` more of each of `gpus`."""
        for gpu in sorted(gpus):
            held = self._held.setdefault(gpu, {})
            others = sorted(name for name in held if name != owner)
            if others:
                self.violations.append(f"{owner} takes memory of GPU {gpu}, which {', '.join(others)} holds")
            held[owner] = held.get(owner, 0) + bytes_

    def give(self, gpus: frozenset[GpuId], owner: str, bytes_: int | None = None) -> None:
        """Let `owner` give `bytes_` of each of `gpus` back, or all it holds."""
        for gpu in gpus:
            held = self._held.setdefault(gpu, {})
            left = held.get(owner, 0) - bytes_ if bytes_ is not None else 0
            if left > 0:
                held[owner] = left
            else:
                held.pop(owner, None)

    def held(self, gpus: frozenset[GpuId], owner: str) -> int:
        """Bytes that `owner` holds of `gpus`, together."""
        return sum(self._held.get(gpu, {}).get(owner, 0) for gpu in gpus)

    def owners(self) -> dict[GpuId, tuple[str, ...]]:
        """Who holds memory of which GPU; a GPU that nobody holds is absent."""
        return {gpu: tuple(sorted(held)) for gpu, held in sorted(self._held.items()) if held}

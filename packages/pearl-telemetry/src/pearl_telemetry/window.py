"""A bounded window over engine samples, in which rare batch sizes stay represented."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from pearl_state.samples import DecodeSample, EngineSamples, PrefillSample, TransferSample

T = TypeVar("T")


class _Strata(Generic[T]):
    """The newest `per_stratum` samples of each of at most `strata` keys; the key longest unseen goes first."""

    def __init__(self, per_stratum: int, strata: int) -> None:
        self._per_stratum = per_stratum
        self._strata = strata
        self._kept: dict[int, deque[T]] = {}

    def add(self, key: int, sample: T) -> None:
        kept = self._kept.pop(key, None)
        if kept is None:
            kept = deque(maxlen=self._per_stratum)
            if len(self._kept) >= self._strata:
                del self._kept[next(iter(self._kept))]
        kept.append(sample)
        self._kept[key] = kept

    def __iter__(self) -> Iterator[T]:
        for kept in self._kept.values():
            yield from kept


class SampleWindow:
    """What the planner's fit looks at: recent samples of all workers, stratified by size.

    Decode samples are kept by number of sequences, prefill and transfer samples by power of two of their tokens, so
    that thousands of full batches do not push out the few small ones that a line needs. Memory is bounded by
    `per_stratum` · `strata` samples of each kind.
    """

    def __init__(self, *, per_stratum: int = 16, strata: int = 64) -> None:
        if per_stratum < 1 or strata < 1:
            raise ValueError(f"per_stratum = {per_stratum}, strata = {strata}: each must be at least 1")
        self._decode: _Strata[DecodeSample] = _Strata(per_stratum, strata)
        self._prefill: _Strata[PrefillSample] = _Strata(per_stratum, strata)
        self._transfer: _Strata[TransferSample] = _Strata(per_stratum, strata)

    def add(self, samples: EngineSamples) -> None:
        """Take in what one worker measured."""
        for decode in samples.decode:
            self._decode.add(decode.sequences, decode)
        for prefill in samples.prefill:
            self._prefill.add(prefill.tokens.bit_length(), prefill)
        for transfer in samples.transfer:
            self._transfer.add(transfer.tokens.bit_length(), transfer)

    @property
    def decode(self) -> list[DecodeSample]:
        """Decode samples in the window."""
        return list(self._decode)

    @property
    def prefill(self) -> list[PrefillSample]:
        """Prefill samples in the window."""
        return list(self._prefill)

    @property
    def transfer(self) -> list[TransferSample]:
        """KV hand-overs in the window."""
        return list(self._transfer)

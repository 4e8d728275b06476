"""Language models that count: interpolated n-grams of bytes with Witten-Bell smoothing.

With h the last k - 1 bytes, c(h w) how often w followed h, c(h) how often anything did, and T(h) how many different
bytes did,

    p_k(w | h) = (c(h w) + T(h) p_(k-1)(w | h')) / (c(h) + T(h)),    h' = h without its first byte,    p_0 = 1/256

and p_k = p_(k-1) where c(h) = 0.
"""

import numpy as np

MAX_ORDER = 7  # bytes and a length fit into 64 bits


def _codes(stream: np.ndarray, size: int) -> np.ndarray:
    """Every run of ``size`` bytes as one number: [N] bytes -> [N - size + 1] numbers."""
    codes = np.zeros(len(stream) - size + 1, dtype=np.uint64)
    for shift in range(size):
        codes = (codes << np.uint64(8)) | stream[shift : len(stream) - size + 1 + shift].astype(np.uint64)
    return codes


class _Counts:
    """How often each of some numbers occurs."""

    def __init__(self, codes: np.ndarray):
        self.codes, self.counts = np.unique(codes, return_counts=True)

    def of(self, codes: np.ndarray) -> np.ndarray:
        if not len(self.codes):
            return np.zeros(len(codes))
        places = np.searchsorted(self.codes, codes).clip(max=len(self.codes) - 1)
        return np.where(self.codes[places] == codes, self.counts[places], 0).astype(np.float64)


class WittenBell:
    """Byte n-grams of ``order`` = n bytes, counted in a stream [N] of uint8; order 1 are frequencies of bytes."""

    def __init__(self, stream: np.ndarray, order: int):
        if not 1 <= order <= MAX_ORDER:
            raise ValueError(f"`order` ({order}) must be from 1 to {MAX_ORDER}")
        if len(stream) < order:
            raise ValueError(f"`stream` has {len(stream)} bytes, fewer than `order` ({order})")
        self.order = order
        self.grams, self.contexts, self.kinds = [], [], []
        for size in range(1, order + 1):
            grams = _Counts(_codes(stream, size))
            self.grams.append(grams)
            self.contexts.append(_Counts(_codes(stream[:-1], size - 1) if size > 1 else np.zeros(len(stream), "u8")))
            self.kinds.append(_Counts(grams.codes >> np.uint64(8)))

    def probabilities(self, stream: np.ndarray) -> np.ndarray:
        """p of every byte of a stream given the ``order`` - 1 before it, or fewer at its beginning: [N] -> [N]."""
        found = np.full(len(stream), 1 / 256)
        for size, (grams, contexts, kinds) in enumerate(
            zip(self.grams, self.contexts, self.kinds, strict=True), start=1
        ):
            if len(stream) < size:
                break
            codes = _codes(stream, size)
            before = codes >> np.uint64(8)
            total, different = contexts.of(before), kinds.of(before)
            seen = total > 0
            lower = found[size - 1 :]
            joined = (grams.of(codes) + different * lower) / np.where(seen, total + different, 1)
            found[size - 1 :] = np.where(seen, joined, lower)
        return found

    def bits_per_byte(self, stream: np.ndarray) -> float:
        return float(-np.log2(self.probabilities(stream)).mean())

"""The order once more, in plain Python integers: an oracle that shares no code with :mod:`quern.mixtures`.

As direct as can be, one value at a time, lists instead of arrays, no concern for speed.
"""

from __future__ import annotations

import hashlib
import heapq
from decimal import Decimal
from fractions import Fraction
from math import gcd, lcm

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
C1 = 0xBF58476D1CE4E5B9
C2 = 0x94D049BB133111EB


def mix(z):
    z &= MASK
    z ^= z >> 30
    z = (z * C1) & MASK
    z ^= z >> 27
    z = (z * C2) & MASK
    z ^= z >> 31
    return z


def subkey(base, j):
    return mix((base + (j + 1) * GOLDEN) & MASK)


def base_key(seed, tag, ident):
    message = str(seed).encode("utf-8") + b"\x00" + tag.encode("utf-8") + b"\x00" + ident.encode("utf-8")
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")


def scramble(v, round_key):
    z = ((v ^ round_key) * C1) & MASK
    z ^= z >> 32
    z = (z * C2) & MASK
    return z >> 32


def num_rounds(n):
    return 24 if n <= 8 else 12 if n <= 128 else 8


def permute(value, n, key):
    if n == 1:
        return 0
    k = (n - 1).bit_length()
    low_bits = -(-k // 2)
    high_bits = k // 2
    while True:
        low, high = value % 2**low_bits, value // 2**low_bits
        for r in range(num_rounds(n)):
            if r % 2 == 0:
                high ^= scramble(low, subkey(key, r)) % 2**high_bits
            else:
                low ^= scramble(high, subkey(key, r)) % 2**low_bits
        value = high * 2**low_bits + low
        if value < n:
            return value


def unpermute(value, n, key):
    if n == 1:
        return 0
    k = (n - 1).bit_length()
    low_bits = -(-k // 2)
    high_bits = k // 2
    while True:
        low, high = value % 2**low_bits, value // 2**low_bits
        for r in range(num_rounds(n) - 1, -1, -1):
            if r % 2 == 0:
                high ^= scramble(low, subkey(key, r)) % 2**high_bits
            else:
                low ^= scramble(high, subkey(key, r)) % 2**low_bits
        value = high * 2**low_bits + low
        if value < n:
            return value


def quantise(weights):
    """The recipe's integers, without common factor and with a sum of at most 2^32."""
    exact = [Fraction(Decimal(repr(w))) if isinstance(w, float) else Fraction(w) for w in weights]
    scale = lcm(*(w.denominator for w in exact))
    counts = [int(w * scale) for w in exact]
    if sum(counts) // gcd(*counts) > 2**32:
        shares = [Fraction(c * 2**32, sum(counts)) for c in counts]
        counts = [int(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda i: (-(shares[i] - counts[i]), i))
        for i in by_remainder[: 2**32 - sum(counts)]:
            counts[i] += 1
    return [c // gcd(*counts) for c in counts]


class Word:
    """Letters as paths from the root: (left weight a, node weight A, came from left)."""

    def __init__(self, weights):
        self.weights = list(weights)
        self.period = sum(weights)
        active = [s for s, a in enumerate(weights) if a > 0]
        heap = [(weights[s], i, s) for i, s in enumerate(active)]
        heapq.heapify(heap)
        number = len(active)
        while len(heap) > 1:
            x, y = heapq.heappop(heap), heapq.heappop(heap)
            heapq.heappush(heap, (x[0] + y[0], number, (x, y)))
            number += 1
        self.root = heap[0]

    def letter(self, n):
        node, m = self.root, n % self.period
        while isinstance(node[2], tuple):
            left, right = node[2]
            total, a = node[0], left[0]
            half = total // 2
            count, remainder = divmod(m * a + half, total)
            if remainder >= total - a:
                node, m = left, count
            else:
                node, m = right, m - count
        return node[2], m + n // self.period * node[0]

    def rank(self, n):
        counts = [0] * len(self.weights)
        stack = [(self.root, n % self.period)]
        while stack:
            node, m = stack.pop()
            if isinstance(node[2], tuple):
                left, right = node[2]
                to_left = (m * left[0] + node[0] // 2) // node[0]
                stack += [(left, to_left), (right, m - to_left)]
            else:
                counts[node[2]] = m + n // self.period * node[0]
        return counts

    def path(self, s, node=None):
        """From the leaf of ``s`` to the root: (a, A, whether the leaf is under the left child)."""
        node = node or self.root
        if not isinstance(node[2], tuple):
            return [] if node[2] == s else None
        left, right = node[2]
        for child, is_left in ((left, True), (right, False)):
            below = self.path(s, child)
            if below is not None:
                return [*below, (left[0], node[0], is_left)]
        return None

    def select(self, s, k):
        turn, k = divmod(k, self.weights[s])
        for a, total, is_left in self.path(s):
            half = total // 2
            if is_left:
                k = ((k + 1) * total - half - 1) // a
            else:
                k = (k * total + half) // (total - a)
        return turn * self.period + k


class Reference:
    """``phases``: (first step, weights, global batch, block) of each phase, the first at step 0."""

    def __init__(self, windows, seed, phases, ids=None):
        self.windows = windows
        ids = ids or [str(s) for s in range(len(windows))]
        self.source_keys = [base_key(seed, "src", ident) for ident in ids]
        self.table = []
        frontier = [0] * len(windows)
        carries = [[] for _ in windows]
        for p, (first_step, weights, global_batch, block) in enumerate(phases):
            recipe = quantise(weights)
            word = Word(recipe)
            g0 = offset = 0
            if p > 0:
                last = self.table[-1]
                g0 = last["g0"] + (first_step - last["first_step"]) * last["global_batch"]
                if recipe == last["word"].weights:
                    offset = last["offset"] + g0 - last["g0"]
                else:
                    offset = base_key(seed, "off", str(p)) % word.period
                frontier, carries = self.cut(last, g0)
            self.table.append(
                {
                    "first_step": first_step, "g0": g0, "global_batch": global_batch, "block": block, "word": word,
                    "offset": offset, "start": word.rank(offset), "frontier": frontier, "carries": carries,
                    "key": base_key(seed, "block", str(p)),
                }
            )  # fmt: skip

    def cut(self, phase, g1):
        """Frontiers and carries after ``phase`` has ended before sample ``g1``."""
        x = g1 - phase["g0"]
        full = -(-x // phase["block"]) * phase["block"]
        ends = phase["word"].rank(phase["offset"] + full)
        holes = [[] for _ in self.windows]
        for position in range(x, full):
            s, kappa = self.index(phase, position)
            holes[s].append(kappa)
        frontiers, carries = [], []
        for s in range(len(self.windows)):
            given = ends[s] - phase["start"][s] if phase["word"].weights[s] else 0
            carry = phase["carries"][s]
            frontier = phase["frontier"][s] + max(0, given - len(carry))
            carry = sorted(holes[s] + carry[given:])
            while carry and carry[-1] == frontier - 1:
                carry.pop()
                frontier -= 1
            frontiers.append(frontier)
            carries.append(carry)
        return frontiers, carries

    def index(self, phase, x):
        """Source and running index kappa of the sample at ``x`` of a phase."""
        block = phase["block"]
        n = x // block * block + permute(x % block, block, subkey(phase["key"], x // block))
        s, k = phase["word"].letter(phase["offset"] + n)
        j = k - phase["start"][s]
        carry = phase["carries"][s]
        return s, carry[j] if j < len(carry) else phase["frontier"][s] + j - len(carry)

    def sample(self, g):
        phase = [phase for phase in self.table if phase["g0"] <= g][-1]
        s, kappa = self.index(phase, g - phase["g0"])
        epoch, i = divmod(kappa, self.windows[s])
        return s, epoch, permute(i, self.windows[s], subkey(self.source_keys[s], epoch))

    def locate(self, s, epoch, window):
        kappa = epoch * self.windows[s] + unpermute(window, self.windows[s], subkey(self.source_keys[s], epoch))
        found = []
        for p, phase in enumerate(self.table):
            if phase["word"].weights[s] == 0:
                continue
            carry = phase["carries"][s]
            if kappa in carry:
                j = carry.index(kappa)
            elif kappa >= phase["frontier"][s]:
                j = len(carry) + kappa - phase["frontier"][s]
            else:
                continue
            n = phase["word"].select(s, j + phase["start"][s]) - phase["offset"]
            block = phase["block"]
            x = n // block * block + unpermute(n % block, block, subkey(phase["key"], n // block))
            if p + 1 == len(self.table) or phase["g0"] + x < self.table[p + 1]["g0"]:
                found.append(phase["g0"] + x)
        assert len(found) <= 1
        return found[0] if found else None

    def step_of(self, g):
        phase = [phase for phase in self.table if phase["g0"] <= g][-1]
        return phase["first_step"] + (g - phase["g0"]) // phase["global_batch"]

    def ranks_at_ends(self):
        """R_s(n0 + length) - R_s(n0) of each phase but the last."""
        table = []
        for phase, after in zip(self.table, self.table[1:], strict=False):
            ends = phase["word"].rank(phase["offset"] + after["g0"] - phase["g0"])
            table.append([end - start for start, end in zip(phase["start"], ends, strict=True)])
        return table

"""Samplers: exact measures by enumerating bit tapes, laws by large samples, secure bits, no low-order leak.

Each statistical test draws a fixed number of samples from the operating system's generator and fails with
probability below 1e-6 when the sampler is right (p-value threshold 1e-6).
"""

import copy
import math
import os
import pickle
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from certify.errors import PrivacyError
from privacy.sampling import NOISE, Cauchy, Laplace, LazyUniform, SecureBits, grid_index, less, public_grid, release

ERROR_RATE = 1e-6


class Exhausted(Exception):
    pass


class Tape:
    """Deterministic bits, for tests only: a fixed string of bits, then Exhausted."""

    def __init__(self, bits):
        self.tape, self.used = bits, 0

    def bits(self, count):
        if self.used + count > len(self.tape):
            raise Exhausted
        chunk = self.tape[self.used : self.used + count]
        self.used += count
        return int("".join(map(str, chunk)), 2)


def enumerate_tapes(run, depth):
    """Yield (result, exact probability) of every tape that decides `run` within `depth` bits; exact
    Fractions."""
    stack = [()]
    while stack:
        tape = stack.pop()
        source = Tape(tape)
        try:
            result = run(source)
        except Exhausted:
            if len(tape) < depth:
                stack += [(*tape, 0), (*tape, 1)]
            continue
        assert source.used == len(tape)
        yield result, Fraction(1, 2 ** len(tape))


def exact_bracket(family, low, high, digits=40):
    """P(low <= Z < high) of the standard law."""
    import mpmath

    mpmath.mp.dps = digits
    if family is Cauchy:
        cdf = lambda x: mpmath.mpf(1) / 2 + mpmath.atan(mpmath.mpf(x)) / mpmath.pi  # noqa: E731
    else:
        cdf = lambda x: mpmath.exp(x) / 2 if x < 0 else 1 - mpmath.exp(-mpmath.mpf(x)) / 2  # noqa: E731
    return cdf(high) - cdf(low)


@pytest.mark.parametrize("grid", [Fraction(1, 2), Fraction(2)])
@pytest.mark.parametrize("family", [Cauchy, Laplace])
def test_rounding_is_exact(family, grid):
    # Decided mass of each grid point <= exact probability <= decided + undecided mass, all by enumeration.
    value, scale = Fraction(1, 3), Fraction(5, 7)
    decided = {}
    for n, p in enumerate_tapes(lambda bits: grid_index(value, scale, family(bits, width=1), grid), 17):
        decided[n] = decided.get(n, 0) + p
    undecided = 1 - sum(decided.values())
    assert undecided < 0.28
    for n in range(-6, 8):
        low, high = ((n + half) * grid for half in (Fraction(-1, 2), Fraction(1, 2)))
        exact = exact_bracket(family, *(float((edge - value) / scale) for edge in (low, high)))
        assert float(decided.get(n, 0)) <= exact + 1e-12
        assert exact <= float(decided.get(n, 0) + undecided) + 1e-12


def test_cauchy_law_is_exact():
    # Cells accepted at first try lie inside the quarter disc, the rest outside; the measures are those of the disc.
    inside = Fraction(0)
    k = 7
    for x in range(1 << k):
        for y in range(1 << k):
            source = Tape(tuple(map(int, f"{x:0{k}b}{y:0{k}b}0")))
            try:
                z = Cauchy(source, width=k)
            except Exhausted:
                continue
            assert (z._x.n, z._y.n) == (x, y)
            assert (x + 1) ** 2 + (y + 1) ** 2 <= 1 << (2 * k)
            inside += Fraction(1, 1 << (2 * k))
    outside = Fraction(sum(x * x + y * y >= 1 << (2 * k) for x in range(1 << k) for y in range(1 << k)), 1 << (2 * k))
    assert inside <= Fraction(math.pi / 4) <= 1 - outside
    assert 1 - outside - inside < Fraction(2, 1 << k) + Fraction(1, 1 << (k - 1))


def test_laplace_law_is_exact():
    # Whole part: decided mass of l brackets (1 - 1/e) e^{-l}.
    decided = {}
    for l, p in enumerate_tapes(lambda bits: Laplace(bits, width=1)._whole, 17):
        decided[l] = decided.get(l, 0) + p
    undecided = 1 - sum(decided.values())
    assert undecided < 0.24
    for l in range(3):
        exact = (1 - math.exp(-1)) * math.exp(-l)
        assert decided[l] <= exact <= decided[l] + undecided


def test_comparison_is_exact():
    below = Fraction(0)
    for result, p in enumerate_tapes(lambda bits: less(LazyUniform(bits, 1), LazyUniform(bits, 1)), 16):
        below += p * result
    assert Fraction(1, 2) - Fraction(1, 256) <= below <= Fraction(1, 2)


@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize("name", ["cauchy", "laplace"])
def test_samples_follow_the_law(name, width):
    bits, n, grid = SecureBits(), 20000, Fraction(1, 2**40)
    x = np.array([grid_index(0, 1, NOISE[name](bits, width), grid) * 2.0**-40 for _ in range(n)])
    assert stats.kstest(x, name).pvalue > ERROR_RATE
    # A sampler that is 25 % off fails the same test.
    assert stats.kstest(1.25 * x, name).pvalue < ERROR_RATE


def test_low_order_bits_do_not_tell_the_value():
    scale, fine, n = 0.1, Fraction(1, 2**70), 6000
    bits = SecureBits()

    def low_bits(value):
        ys = [grid_index(value, scale, Cauchy(bits), fine) for _ in range(n)]
        return np.bincount([y % 16 for y in ys if abs(y) * fine < Fraction(1, 2)], minlength=16)

    near, far = low_bits(0.0), low_bits(1.0)
    assert stats.chi2_contingency([near, far]).pvalue > ERROR_RATE
    assert stats.chisquare(near).pvalue > ERROR_RATE and stats.chisquare(far).pvalue > ERROR_RATE

    rng = np.random.default_rng(0)

    def naive(value):
        y = value + scale * rng.standard_cauchy(200000)
        y = y[np.abs(y) < 0.5] * 2.0**60
        fractional = np.sum(y != np.round(y))
        return [fractional, len(y) - fractional]

    assert naive(1.0)[0] == 0 and stats.chi2_contingency([naive(0.0), naive(1.0)]).pvalue < 1e-20


def test_grid_does_not_depend_on_the_scale():
    grid, bits = 2.0**-10, SecureBits()
    for scale in (1e-9, 1e-3, 1.0, 1e6):
        y = release(0.3, scale, Laplace(bits), grid)
        assert (y / grid).is_integer()


@pytest.mark.parametrize("name", ["cauchy", "laplace"])
def test_huge_noise_does_not_overflow(name):
    # A tape with Z = 3e18, and huge scales: exact integers, clipped.
    z = Cauchy(Tape((0,) + (1,) * 62 + (0,) + (0,) * 62 + (1, 1) + (0,) * 10000))
    assert release(0.0, 1e300, z, 2.0**-40, (-6.0, 6.0)) == 6.0
    z = NOISE[name](SecureBits())
    assert abs(release(0.0, 1.7e308, z, 2.0**-40)) <= 1.7976931348623157e308
    for _ in range(200):
        assert -1.0 <= release(0.25, 1e9, NOISE[name](SecureBits()), 2.0**-45, (-1.0, 1.0)) <= 1.0


def test_noise_is_used_once():
    z = Laplace(SecureBits())
    release(0.0, 1.0, z, 0.25)
    with pytest.raises(PrivacyError, match="released before"):
        release(1.0, 1.0, z, 0.25)


@pytest.mark.parametrize(("scale", "grid"), [(0.0, 0.25), (-1.0, 0.25), (1.0, 0.3), (1.0, -0.5)])
def test_bad_scales_and_grids_are_refused(scale, grid):
    with pytest.raises(PrivacyError, match="grid"):
        release(0.0, scale, Laplace(SecureBits()), grid)


def test_rounding_is_half_up_of_the_ideal_value():
    # Against rational arithmetic: refine the tape far and round the midpoint interval directly.
    rng = np.random.default_rng(3)
    for family in (Cauchy, Laplace):
        for _ in range(300):
            tape = tuple(rng.integers(0, 2, 6000))
            value, scale = Fraction(float(rng.normal())), Fraction(float(rng.exponential()))
            n = grid_index(value, scale, family(Tape(tape), width=3), Fraction(1, 1024))
            z = family(Tape(tape), width=3)
            for _ in range(7):
                z.refine()
            p, q, P, Q = z.interval()
            ends = {math.floor((value + scale * Fraction(*e)) * 1024 + Fraction(1, 2)) for e in ((p, q), (P, Q))}
            assert ends == {n}


def test_public_grid_keeps_outputs_exact():
    for low, high in ((-6.0, 6.0), (0.0, 1.0), (-1e-9, 0.0), (1e6, 1e6 + 1), (-1e300, 3.0)):
        grid, top = public_grid(low, high), max(abs(low), abs(high))
        assert math.frexp(grid)[0] == 0.5 and top / grid < 2**46 and (top / 2) / grid >= 2**43


def test_bits_are_uniform():
    bits = SecureBits()
    words = [bits.bits(3) for _ in range(16000)]
    assert stats.chisquare(np.bincount(words, minlength=8)).pvalue > ERROR_RATE
    long = [bits.bits(200) for _ in range(2000)]
    assert max(long).bit_length() > 190 and len(set(long)) == 2000
    ones = [sum(v >> i & 1 for v in long) for i in range(200)]
    assert max(abs(o - 1000) for o in ones) < 200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_does_not_repeat_bits():
    bits = SecureBits()
    bits.bits(64)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"".join(bits.bits(64).to_bytes(8, "big") for _ in range(8)))
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 64)
    os.close(read), os.close(write)
    ours = b"".join(bits.bits(64).to_bytes(8, "big") for _ in range(8))
    words = {w[i : i + 8] for w in (ours, theirs) for i in range(0, 64, 8)}
    assert len(theirs) == 64 and len(words) == 16


def test_copies_do_not_repeat_bits():
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copier(SecureBits())


def test_there_is_no_seed():
    with pytest.raises(TypeError):
        SecureBits(0)
    assert SecureBits().bits(256) != SecureBits().bits(256)

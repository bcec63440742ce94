"""The corrections to the paper, each as a counterexample, and exhaustive small worlds.

White box, no sampling error: the laws of neighbouring data sets are known, so their exact privacy loss is
computed. In every counterexample the paper's literal rule fails the check that our functions pass.
The findings are numbered as in docs/privacy.md.
"""

import itertools
import math

import numpy as np
import pytest
from test_privacy_oracle import cauchy_epsilon, laplace_delta

import privacy
from privacy import smooth

SLACK = 1 + 1e-9


def ours(lower, upper, ceiling, family, epsilon, delta=0.0, betas=None):
    """(smooth bounds by beta, noise scales) of our functions for query bounds (K+1, worlds) of each data
    set."""
    cross = privacy.cross_ranges(lower, upper)
    pairs = privacy.admissible_pairs(family, epsilon, delta, betas=betas)
    bounds = {p.beta: privacy.smooth_bound(cross, ceiling, p.beta) for p in pairs}
    return bounds, privacy.noise_scale(bounds, pairs)


def worst_loss(f, scale, neighbours, family="cauchy", epsilon=None):
    """Exact worst epsilon (Cauchy) or delta at epsilon (Laplace) over the neighbouring pairs (i, j)."""
    worst = 0.0
    for i, j in neighbours:
        if family == "cauchy":
            worst = max(worst, cauchy_epsilon(f[i], scale[i], f[j], scale[j]))
        else:
            worst = max(worst, laplace_delta(epsilon, f[i], scale[i], f[j], scale[j]))
            worst = max(worst, laplace_delta(epsilon, f[j], scale[j], f[i], scale[i]))
    return worst


def clipped_sum_bounds(z, k):
    """Top-k aggregate of per-record values in [-1, 1]: the smallest and largest sum with k records
    replaced."""
    z, k = np.sort(z), min(k, len(z))
    return z[: len(z) - k].sum() - k, z[k:].sum() + k


# --- A1: half range ---


def half_range_bound(z, beta, n):
    """Algorithm 1, literally: distance from the nominal value, j from 1 to N, back-filled from radii above
    j."""
    bounds = [clipped_sum_bounds(z, k) for k in range(n + 1)]
    f = bounds[0][0]
    h = [max(high - f, f - low) for low, high in bounds]
    a = [h[n]] * (n + 1)
    for k in range(1, n + 1):
        for j in range(1, k):
            a[j] = min(a[j], h[k])
    return max(math.exp(-beta * j) * a[j] for j in range(1, n + 1))


@pytest.mark.parametrize("epsilon", [0.1, 0.2, 0.5])
def test_a1_half_range_is_not_private_and_cross_range_is(epsilon):
    data = [np.array([-1.0, -1.0]), np.array([1.0, -1.0])]
    f = [z.sum() for z in data]
    beta = epsilon / 6
    literal = [half_range_bound(z, beta, 2) for z in data]
    assert max(literal) / min(literal) == pytest.approx(2.0)
    assert worst_loss(f, [6 * s / epsilon for s in literal], [(0, 1)]) >= math.log(2)
    # Doubling is no repair.
    assert worst_loss(f, [12 * s / epsilon for s in literal], [(0, 1)]) > epsilon

    bounds = np.array([[clipped_sum_bounds(z, k) for z in data] for k in range(4)])
    _, scale = ours(bounds[..., 0], bounds[..., 1], 4.0, "cauchy", epsilon)
    assert worst_loss(f, scale, [(0, 1)]) <= epsilon * SLACK
    # The cross range is smooth without the help of a ceiling, too.
    _, scale = ours(bounds[..., 0], bounds[..., 1], 1e6, "cauchy", epsilon)
    assert worst_loss(f, scale, [(0, 1)]) <= epsilon * SLACK


def test_a1_half_range_is_not_an_upper_bound():
    # All gradients 0, four records: replacing -1 by +1 inside radius 1 moves the sum by 2, the half range says 1.
    low, high = clipped_sum_bounds(np.zeros(4), 1)
    assert max(high, -low) == 1.0
    two = np.array([clipped_sum_bounds(np.zeros(4), k) for k in range(3)])
    assert privacy.cross_ranges(two[:, 0], two[:, 1])[1] >= 2.0


# --- A2: k from 1 ---


@pytest.mark.parametrize(("epsilon", "spent"), [(5.0, 5.055), (10.0, 11.43)])
def test_a2_starting_at_one_is_not_private_and_starting_at_zero_is(epsilon, spent):
    n = 1000
    data = [np.ones(n), np.r_[np.ones(n - 1), -1.0]]
    bounds = np.array([[clipped_sum_bounds(z, k) for z in data] for k in range(60)]) / n
    lower, upper = bounds[..., 0], bounds[..., 1]
    f, beta = lower[0], epsilon / 2
    cross = privacy.cross_ranges(lower, upper)
    from_one = np.max([np.exp(-beta * k) * cross[k] for k in range(1, 59)], axis=0)
    loss = worst_loss(f, from_one / (epsilon - beta), [(0, 1)])
    assert loss == pytest.approx(spent, abs=5e-3) and loss > epsilon
    from_zero = privacy.smooth_bound(cross, 2.0, beta)
    assert worst_loss(f, from_zero / (epsilon - beta), [(0, 1)]) <= epsilon
    # And with the exact calibration, where the loss of k = 0 would be felt at any epsilon.
    _, scale = ours(lower, upper, 2.0, "cauchy", epsilon)
    assert 0.5 * epsilon < worst_loss(f, scale, [(0, 1)]) <= epsilon * SLACK


# --- A4: back-filling a sparse list of radii ---


def threshold_bounds(n, t, radii):
    """Exact bounds of 1[ones >= t] for data sets with s = 0..n ones; (len(radii), n + 1)."""
    s, k = np.arange(n + 1), np.array(radii)[:, None]
    return (np.maximum(0, s - k) >= t).astype(float), (np.minimum(n, s + k) >= t).astype(float)


def test_a4_backfilling_is_not_private_and_the_index_discount_is():
    n, t, epsilon, beta = 64, 32, 1.0, 0.5
    neighbours = [(i, i + 1) for i in range(n)]
    every = range(n + 2)
    lower, upper = threshold_bounds(n, t, every)
    f, dense_cross = lower[0], privacy.cross_ranges(lower, upper)

    listed = (0, 1, 2, 4, 8, 64)
    filled = np.zeros(n + 1)
    for j in range(n + 1):
        known = next(k for k in listed if k >= j)
        filled = np.maximum(filled, math.exp(-beta * j) * dense_cross[known])
    assert worst_loss(f, filled / (epsilon - beta), neighbours) == pytest.approx(2.0, abs=0.05)

    sparse = privacy.cross_ranges(*threshold_bounds(n, t, listed))
    by_index = privacy.smooth_bound_indexed(sparse, 1.0, beta, listed)
    assert worst_loss(f, by_index / (epsilon - beta), neighbours) <= epsilon * SLACK
    dense = privacy.smooth_bound(dense_cross, 1.0, beta, radii=every)
    assert worst_loss(f, dense / (epsilon - beta), neighbours) <= epsilon * SLACK
    pair = privacy.admissible_pairs("cauchy", epsilon, betas=[beta])
    for bound in (by_index, dense):
        scale = privacy.noise_scale({beta: bound}, pair)
        assert 0.5 < worst_loss(f, scale, neighbours) <= epsilon * SLACK
    # The sparse list is refused by the dense form, by name.
    with pytest.raises(Exception, match="without gaps"):
        privacy.smooth_bound(sparse, 1.0, beta, radii=listed)
    # On demand: the radii it asks for suffice, and the result is the dense one.
    for s in range(0, n + 1, 7):
        one = privacy.dense_maximum(lambda ks, s=s: {k: dense_cross[k, s : s + 1] for k in ks}, [1.0], beta, n)
        assert one[0] == dense[s]


# --- A7: clipping after the noise only ---


def test_a7_clipping_afterwards_is_not_private_and_clipping_before_is():
    epsilon, low, high, far = 1.0, -6.0, 6.0, 1e4
    # D predicts 0, its neighbour 1e4; radius 1 of either reaches both. The public range is [-6, 6], so "GS = 12".
    nominal = np.array([[0.0, far]])
    lower, upper = np.array([[[0.0, far]], [[0.0, 0.0]]]), np.array([[[0.0, far]], [[far, far]]])
    late = 6 * np.array([12.0, 12.0]) / epsilon
    # Clipping is a function of the output; the mass inside the range already gives it away.
    assert cauchy_epsilon(0.0, late[0], far, late[1]) > 6.3
    y = np.linspace(low, high, 101)
    inside = np.log((late[0] ** 2 + (y - far) ** 2) / (late[0] ** 2 + y**2))
    assert np.min(inside) > 6.0

    _, private = privacy.release_predictions(nominal, lower, upper, None, (low, high), 2 * epsilon, joint=False)
    assert private.nominal.tolist() == [[0.0, high]]
    f, scale = private.nominal[0], private.scale[0]
    assert abs(f[0] - f[1]) <= min(s[0].min() for s in private.smooth.values())
    assert worst_loss(f, scale, [(0, 1)]) <= epsilon * SLACK


# --- A9: one-dimensional beta for a vector of outputs ---


def test_a9_one_dimensional_beta_for_vectors_is_not_private_and_shares_are():
    # Fifty equal threshold outputs; s = 30 and 31 ones, threshold 32: same values, smooth bounds a factor e^beta apart.
    outputs, epsilon, n, t = 50, 1.0, 64, 32
    lower, upper = threshold_bounds(n, t, range(n + 1))
    beta = epsilon / 6
    bound = outputs * privacy.smooth_bound(privacy.cross_ranges(lower, upper), 1.0, beta)
    literal = 6 * bound / epsilon
    assert outputs * cauchy_epsilon(0.0, literal[30], 0.0, literal[31]) > 8.3 * epsilon

    kept = []
    for ones in (30, 31, 32):
        low, high = (np.repeat(x[:, ones], outputs).reshape(n + 1, 1, outputs) for x in (lower, upper))
        kept.append(privacy.release_predictions(low[0], low, high, None, (0.0, 1.0), epsilon)[1])
    for one, two in zip(kept, kept[1:], strict=False):
        laws = zip(one.nominal[0], one.scale[0], two.nominal[0], two.scale[0], strict=True)
        assert sum(cauchy_epsilon(*law) for law in laws) <= epsilon * SLACK


# --- exhaustive worlds: clipped steps, hand-written interval bounds with top-k ---


def train_bounds(data, steps, batches, k, step_size, gradient):
    """Interval training of one scalar parameter: (lower, upper) after `steps` steps within radius `k`."""
    low = high = 0.0
    for t in range(steps):
        batch = batches[t % len(batches)]
        g = np.array([np.clip(gradient(low, high, data[i]), -1.0, 1.0) for i in batch])
        sums = clipped_sum_bounds(g[:, 0], k)[0], clipped_sum_bounds(g[:, 1], k)[1]
        size = step_size / len(batch)
        low, high = low - size * sums[1], high - size * sums[0]
    return low, high


def mean_gradient(low, high, z):
    """(theta - z): natural interval extension, clipped by the caller."""
    return low - z, high - z


def hinge_gradient(low, high, z):
    """-z where z theta < 1/2, else 0: interval extension of a step."""
    ends = sorted((z * low, z * high))
    options = [-z] * bool(ends[0] < 0.5) + [0.0] * bool(ends[1] >= 0.5)
    return min(options), max(options)


UNIVERSE = (-2.0, 0.25, 1.0)
WORLDS = [
    ("one full-batch step", mean_gradient, 3, 1, [[0, 1, 2]]),
    ("two full-batch steps", mean_gradient, 4, 2, [[0, 1, 2, 3]]),
    ("two steps, two batches", mean_gradient, 4, 2, [[0, 1], [2, 3]]),
    ("hinge, three steps", hinge_gradient, 4, 3, [[0, 1], [2, 3]]),
]


def build_world(gradient, n, steps, batches, universe=UNIVERSE):
    """All data sets of n records, their bounds for radii 0..n (step size 1/2: exact in float64), and
    neighbouring pairs."""
    sets = list(itertools.product(universe, repeat=n))
    index = {d: i for i, d in enumerate(sets)}
    bounds = np.array([[train_bounds(d, steps, batches, k, 0.5, gradient) for d in sets] for k in range(n + 1)])
    pairs = [
        (i, index[d[:j] + (z,) + d[j + 1 :]])
        for i, d in enumerate(sets)
        for j in range(n)
        for z in universe
        if z > d[j]
    ]
    return bounds[..., 0], bounds[..., 1], pairs


@pytest.mark.parametrize(("name", "gradient", "n", "steps", "batches"), WORLDS, ids=[w[0] for w in WORLDS])
@pytest.mark.parametrize("k_max", [1, 2, None])
def test_exhaustive_world(name, gradient, n, steps, batches, k_max):
    lower, upper, pairs = build_world(gradient, n, steps, batches)
    f = lower[0]
    assert np.array_equal(lower[0], upper[0])
    one, two = np.array(pairs).T
    for k in range(n):  # the worlds themselves have (S) and (M)
        assert np.all(lower[k + 1][one] <= lower[k][two]) and np.all(upper[k + 1][one] >= upper[k][two])
    # Public range [-1/4, 1]: predictions at the public input x = 2, clipped before anything else.
    lower, upper = (np.clip(2 * x, -0.25, 1.0)[: None if k_max is None else k_max + 1] for x in (lower, upper))
    f = lower[0]
    for family, epsilon, delta in (
        ("cauchy", 0.1, 0.0),
        ("cauchy", 1.0, 0.0),
        ("cauchy", 5.0, 0.0),
        ("laplace", 0.5, 1e-3),
        ("laplace", 3.0, 1e-2),
    ):
        bounds, scale = ours(lower, upper, 1.25, family, epsilon, delta)
        for beta, s in bounds.items():
            assert np.all(np.abs(f[one] - f[two]) <= np.minimum(s[one], s[two]))
            assert np.all(np.abs(np.log(s[one] / s[two])) <= beta + math.log1p(smooth.TAU))
        laws = {(f[i], scale[i], f[j], scale[j]) for i, j in pairs}
        for fi, si, fj, sj in laws:
            loss = worst_loss([fi, fj], [si, sj], [(0, 1)], family, epsilon)
            assert loss <= (epsilon if family == "cauchy" else delta) * SLACK


def test_exhaustive_world_catches_planted_mistakes():
    """The check above fails for each rule that the corrections replace."""
    lower, upper, pairs = build_world(mean_gradient, 4, 2, [[0, 1], [2, 3]])
    f, epsilon = lower[0], 5.0
    cross = privacy.cross_ranges(lower, upper)
    (pair,) = privacy.admissible_pairs("cauchy", epsilon)

    def loss(bound, factor=1.0):
        scale = bound / pair.a / factor
        laws = {(f[i], scale[i], f[j], scale[j]) for i, j in pairs}
        return max(cauchy_epsilon(*law) for law in laws)

    good = privacy.smooth_bound(cross, 4.0, pair.beta)
    assert loss(good) <= epsilon * SLACK
    assert loss(good, 1.5) > epsilon
    assert loss(np.max([math.exp(-pair.beta * k) * cross[k] for k in range(1, 4)], axis=0)) > epsilon
    half = np.maximum(upper[1:] - f, f - lower[1:])
    assert loss(np.max([math.exp(-pair.beta * (k + 1)) * half[k] for k in range(4)], axis=0)) > epsilon


def test_release_predictions_of_neighbours_stay_within_the_claim():
    """End to end: the scales that release_predictions really uses, all neighbours of a small world, two
    outputs."""
    lower, upper, pairs = build_world(mean_gradient, 3, 1, [[0, 1, 2]])
    inputs = np.array([1.0, -2.0])
    lo = np.minimum(inputs[:, None, None] * lower, inputs[:, None, None] * upper)
    up = np.maximum(inputs[:, None, None] * lower, inputs[:, None, None] * upper)
    for epsilon, delta in ((1.0, 0.0), (2.0, 1e-2)):
        kept = []
        for i in range(lower.shape[1]):
            args = lo[:, 0, i][None].T[None], lo[:, :, i].T[..., None], up[:, :, i].T[..., None]
            _, private = privacy.release_predictions(
                args[0][0], *args[1:], None, (-0.75, 0.5), epsilon, delta, joint=False
            )
            kept.append((private.nominal[:, 0], private.scale[:, 0]))
        for i, j in pairs:
            spent = [
                worst_loss(
                    [kept[i][0][q], kept[j][0][q]],
                    [kept[i][1][q], kept[j][1][q]],
                    [(0, 1)],
                    "laplace" if delta else "cauchy",
                    epsilon / 2,
                )
                for q in range(2)
            ]
            assert sum(spent) <= (delta or epsilon) * SLACK

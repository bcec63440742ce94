"""Every operator and loss: interval rules against point rules.

Three properties, over random boxes: a degenerate box gives the point result bit for bit; the box contains the point
result of every sampled point; a wider box one rung up the ladder contains a narrower one, compared exactly.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.losses import LOSSES, make_loss
from models.ops import (
    Abs,
    Add,
    Affine,
    Clip,
    Concat,
    Div,
    Elu,
    Gather,
    Interval,
    LeakyRelu,
    Mul,
    Neg,
    Relu,
    SegmentSum,
    Select,
    Sigmoid,
    Softplus,
    Sub,
    Tanh,
)

F, N = 4, 5
PERMUTED = np.array([2, -1, 0, 3, 3])
POOLED = np.array([[0, 1, -1], [1, 2, 3]])
CASES = {
    "Add": (Add(), (F, F)),
    "Sub": (Sub(), (F, F)),
    "Mul": (Mul(), (F, F)),
    "Div": (Div(), (F, F)),
    "Relu": (Relu(), (F,)),
    "LeakyRelu": (LeakyRelu(0.2), (F,)),
    "Elu": (Elu(0.7), (F,)),
    "Softplus": (Softplus(), (F,)),
    "Sigmoid": (Sigmoid(), (F,)),
    "Tanh": (Tanh(), (F,)),
    "Clip": (Clip(-0.5, 1.0), (F,)),
    "Abs": (Abs(), (F,)),
    "Neg": (Neg(), (F,)),
    "Select": (Select(0.3), (F, F, F)),
    "Gather": (Gather(PERMUTED, F), (F,)),
    "SegmentSum": (SegmentSum(POOLED, F), (F,)),
    "Concat": (Concat((F, 2)), (F, 2)),
    "Affine": (Affine(3, F), (F, 3 * F, 3)),
    "Affine without bias": (Affine(3, F), (F, 3 * F)),
    "Affine at positions": (Affine(3, 2, 2), (4, 6, 3)),
    "Affine midpoint-radius": (Affine(3, F, 1, "midpoint-radius"), (F, 3 * F, 3)),
}
SHARED = {name: (1, 2) for name in ("Affine", "Affine without bias", "Affine at positions", "Affine midpoint-radius")}
cases = pytest.mark.parametrize("name", CASES)
seeds = given(st.integers(0, 2**32 - 1))
quick = settings(max_examples=40, deadline=None)


def columns(name, position):
    return 1 if position in SHARED.get(name, ()) else N


def random_boxes(rng, name):
    """Boxes of every input, some degenerate, some with an end at a kink, some huge or tiny."""
    _, sizes = CASES[name]
    boxes = []
    for position, size in enumerate(sizes):
        shape = (size, columns(name, position))
        centre = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 2)
        centre = np.where(rng.random(shape) < 0.2, np.round(centre), centre)
        width = np.abs(rng.normal(size=shape)) * 10.0 ** rng.integers(-9, 1) * (rng.random(shape) < 0.7)
        if name == "Div" and position == 1:
            centre = np.where(np.abs(centre) < 0.1, 0.3, centre)
            width = np.minimum(width, np.abs(centre) / 2)
        boxes.append(Interval(centre - width, centre + width))
    return boxes


def inside(rng, box):
    t = rng.random(box.lower.shape)
    t = np.where(rng.random(t.shape) < 0.3, np.round(t), t)
    return np.clip(box.lower + t * (box.upper - box.lower), box.lower, box.upper)


def wider(rng, box):
    grow = np.abs(rng.normal(size=box.lower.shape)) * 10.0 ** rng.integers(-12, 0)
    grow = grow * (rng.random(grow.shape) < 0.6)
    return Interval(box.lower - grow, box.upper + grow)


def both_ways(op, args, adjoint, ladder=None):
    """Forward value and backward results, as lists of arrays or intervals."""
    needed = [True] * len(args)
    if ladder is None:
        out = op.forward(args)
        back = op.backward(adjoint, args, out, needed)
    else:
        out = op.forward_interval(args, ladder)
        back = op.backward_interval(adjoint, args, out, needed, ladder)
    return [out, *(b for b in back if b is not None)]


def output_shape(op, args):
    return op.forward([a.lower for a in args]).shape


@cases
@quick
@seeds
def test_a_degenerate_box_gives_the_point_result_bit_for_bit(name, seed):
    rng = np.random.default_rng(seed)
    op, _ = CASES[name]
    args = [b.lower for b in random_boxes(rng, name)]
    adjoint = rng.normal(size=(op.forward(args).shape[0], N))
    points = both_ways(op, args, adjoint)
    boxes = both_ways(op, [Interval(a, a) for a in args], Interval(adjoint, adjoint), 0.0)
    for point, box in zip(points, boxes, strict=True):
        if op == CASES["Affine midpoint-radius"][0]:
            np.testing.assert_allclose(box.lower, point, rtol=1e-12, atol=1e-12)
        else:
            np.testing.assert_array_equal(box.lower, point)
            np.testing.assert_array_equal(box.upper, point)


@cases
@quick
@seeds
def test_a_box_contains_the_result_of_every_point_inside(name, seed):
    rng = np.random.default_rng(seed)
    op, _ = CASES[name]
    boxes = random_boxes(rng, name)
    shape = (output_shape(op, boxes)[0], N)
    adjoint = Interval(*np.sort(rng.normal(size=(2, *shape)), axis=0))
    bounds = both_ways(op, boxes, adjoint, 2.0)
    for _ in range(5):
        points = both_ways(op, [inside(rng, b) for b in boxes], inside(rng, adjoint))
        for point, bound in zip(points, bounds, strict=True):
            assert (bound.lower <= point).all() and (point <= bound.upper).all()


@cases
@quick
@seeds
def test_wider_boxes_one_rung_up_contain_narrower_ones_exactly(name, seed):
    rng = np.random.default_rng(seed)
    op, _ = CASES[name]
    boxes = random_boxes(rng, name)
    adjoint = Interval(*np.sort(rng.normal(size=(2, output_shape(op, boxes)[0], N)), axis=0))
    rung = 2.0 * rng.integers(1, 30)
    narrow = both_ways(op, boxes, adjoint, rung)
    wide = both_ways(op, [wider(rng, b) for b in boxes], wider(rng, adjoint), rung + 2.0)
    point = [inside(rng, b) for b in boxes]
    lowest = both_ways(op, point, inside(rng, adjoint))
    for small, large, at in zip(narrow, wide, lowest, strict=True):
        assert (large.lower <= small.lower).all() and (small.upper <= large.upper).all()
        assert (small.lower <= at).all() and (at <= small.upper).all()


def exactly(value):
    return np.vectorize(Fraction, otypes=[object])(value)


def exact_affine(args):
    x, weight, bias = (exactly(a) for a in args)
    return weight.reshape(3, F) @ x + bias


RATIONAL = {
    "Add": lambda args: exactly(args[0]) + exactly(args[1]),
    "Sub": lambda args: exactly(args[0]) - exactly(args[1]),
    "Mul": lambda args: exactly(args[0]) * exactly(args[1]),
    "Div": lambda args: exactly(args[0]) / exactly(args[1]),
    "LeakyRelu": lambda args: np.maximum(exactly(args[0]), Fraction(0.2) * exactly(args[0])),
    "SegmentSum": lambda args: np.array([exactly(args[0])[row[row >= 0]].sum(axis=0) for row in POOLED]),
    "Affine": exact_affine,
    "Affine midpoint-radius": exact_affine,
}


def decimal_function(function):
    """A scalar function in 50 decimal digits, for arrays."""

    def one(value):
        with localcontext() as context:
            context.prec = 50
            return Fraction(function(Decimal(float(value))))

    return lambda args: np.vectorize(one, otypes=[object])(args[0])


TRANSCENDENTAL = {
    "Sigmoid": decimal_function(lambda v: 1 / (1 + (-v).exp())),
    "Tanh": decimal_function(lambda v: 1 - 2 / (1 + (2 * v).exp())),
    "Softplus": decimal_function(lambda v: (1 + v.exp()).ln()),
    "Elu": decimal_function(lambda v: v if v > 0 else Decimal(0.7) * (v.exp() - 1)),
}


@pytest.mark.parametrize("name", [*RATIONAL, *TRANSCENDENTAL])
def test_outward_rounding_contains_the_exact_real_result(name):
    """A point's bounds at radius 1 against exact arithmetic, and without the ladder they miss it somewhere."""
    rng = np.random.default_rng(11)
    op, _ = CASES[name]
    missed = False
    for _ in range(60):
        args = [np.clip(b.lower, -30.0, 30.0) for b in random_boxes(rng, name)]
        boxes = [Interval(a, a) for a in args]
        exact = {**RATIONAL, **TRANSCENDENTAL}[name](args)
        bound = op.forward_interval(boxes, 2.0)
        assert (exactly(bound.lower) <= exact).all() and (exact <= exactly(bound.upper)).all()
        bare = op.forward_interval(boxes, 0.0)
        missed |= bool((exactly(bare.lower) > exact).any() or (exact > exactly(bare.upper)).any())
    assert missed, "rounding never showed: the test would not notice a missing ladder"


@cases
def test_backward_is_the_derivative_of_forward(name):
    rng = np.random.default_rng(7)
    op, _ = CASES[name]
    args = [b.lower + 0.0137 for b in random_boxes(rng, name)]
    out = op.forward(args)
    adjoint = rng.normal(size=(out.shape[0], N))
    back = op.backward(adjoint, args, out, [True] * len(args))
    for position, result in enumerate(back):
        if result is None:
            continue
        for f in range(args[position].shape[0]):
            step = 1e-6
            moved = [a.copy() for a in args]
            moved[position][f] += step
            high = op.forward(moved)
            moved[position][f] -= 2 * step
            numeric = ((high - op.forward(moved)) / (2 * step) * adjoint).sum(axis=0)
            np.testing.assert_allclose(result[f], numeric, rtol=2e-4, atol=2e-4)


def random_targets(rng, loss):
    if loss.name in ("hinge", "smoothed-hinge"):
        return rng.choice([-1.0, 1.0], size=(3, N))
    if loss.name == "logistic":
        return rng.choice([0.0, 1.0], size=(3, N))
    if loss.name == "cross-entropy":
        return loss.prepare(rng.integers(0, 3, size=(1, N)).astype(float), 3)
    return np.round(rng.normal(size=(3, N)), 1)


@pytest.mark.parametrize("name", LOSSES)
@quick
@seeds
def test_loss_gradients_have_the_same_three_properties(name, seed):
    rng = np.random.default_rng(seed)
    loss = make_loss(name)
    y = random_targets(rng, loss)
    centre = rng.normal(size=(3, N)) * 10.0 ** rng.integers(-2, 3)
    centre = np.where(rng.random((3, N)) < 0.2, np.round(centre), centre)
    box = Interval(centre - np.abs(rng.normal(size=(3, N))) * 0.3, centre)
    degenerate = loss.gradient_interval(Interval(centre, centre), y, 0.0)
    np.testing.assert_array_equal(degenerate.lower, loss.gradient(centre, y))
    np.testing.assert_array_equal(degenerate.upper, loss.gradient(centre, y))
    rung = 2.0 * rng.integers(1, 30)
    bound = loss.gradient_interval(box, y, rung)
    above = loss.gradient_interval(wider(rng, box), y, rung + 2.0)
    assert (above.lower <= bound.lower).all() and (bound.upper <= above.upper).all()
    for _ in range(5):
        g = loss.gradient(inside(rng, box), y)
        assert (bound.lower <= g).all() and (g <= bound.upper).all()


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradient_is_the_derivative_of_its_value(name):
    rng = np.random.default_rng(3)
    loss = make_loss(name, huber_delta=0.7, hinge_width=0.6)
    y, p = random_targets(rng, loss), rng.normal(size=(3, N)) + 0.0137
    for f in range(3):
        high, low = p.copy(), p.copy()
        high[f] += 1e-6
        low[f] -= 1e-6
        numeric = (loss.value(high, y) - loss.value(low, y)) / 2e-6
        np.testing.assert_allclose(loss.gradient(p, y)[f], numeric, rtol=1e-5, atol=1e-5)


def test_the_kernel_for_known_inputs_gives_the_bits_of_the_general_one():
    rng = np.random.default_rng(0)
    for cols in range(1, 6):
        x = rng.normal(size=(2 * cols, N))
        w = Interval(*np.sort(rng.normal(size=(2, 3 * cols, 1)), axis=0))
        b = Interval(*np.sort(rng.normal(size=(2, 3, 1)), axis=0))
        known = Affine(3, cols, 2).forward_interval([Interval(x, x), w, b], 2.0)
        general = Affine(3, cols, 2).forward_interval([Interval(x, x.copy()), w, b], 2.0)
        np.testing.assert_array_equal(known.lower, general.lower)
        np.testing.assert_array_equal(known.upper, general.upper)


def test_natural_products_are_inside_midpoint_radius_products():
    rng = np.random.default_rng(0)
    x = Interval(*np.sort(rng.normal(size=(2, F, N)), axis=0))
    w = Interval(*np.sort(rng.normal(size=(2, 3 * F, 1)), axis=0))
    natural = Affine(3, F).forward_interval([x, w], 2.0)
    rump = Affine(3, F, 1, "midpoint-radius").forward_interval([x, w], 2.0)
    assert (rump.lower <= natural.lower + 1e-12).all() and (natural.upper <= rump.upper + 1e-12).all()
    assert (rump.upper - rump.lower).sum() > 1.05 * (natural.upper - natural.lower).sum()


def test_overflow_is_outward_and_division_by_a_box_around_zero_is_everything():
    huge = Interval(np.full((1, 1), -1e308), np.full((1, 1), 1e308))
    product = Mul().forward_interval([huge, huge], 2.0)
    assert product.lower[0, 0] == -np.inf and product.upper[0, 0] == np.inf
    around = Interval(np.full((1, 1), -1.0), np.full((1, 1), 2.0))
    quotient = Div().forward_interval([around, around], 2.0)
    assert quotient.lower[0, 0] == -np.inf and quotient.upper[0, 0] == np.inf

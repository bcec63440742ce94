"""Private labels: AGT-R for a classifier, the indicator case (THEORY section 5; paper: Proposition IV.1, corrected).

The query is the vector of class indicators `f_c(D) = 1[the label is c]`: one number for a binary model (one output,
label 1 above a public threshold), `C` numbers for `C` outputs (label = argmax, ties to the lower class). It is
released with noise; the label shown is the one with the largest noisy indicator, which is post-processing.

Two labels that differ change one number (binary) or two (one-hot) by 1, so the norm of the change is `1` or
`2`, `sqrt 2`, `1` in l1, l2, linf. The label can only differ from that of a neighbour if it is not certified at
radius 1. Hence, with `size` that norm,

    A_k(D) = size * 1[the label is not certified at radius k + 1],   k = 0, 1, ...

bounds the change for neighbours within distance k, and `A_k(D) <= A_{k+1}(D')` by property (M): it is the cross range
of the indicators. If the first radius that is not certified is `K + 1`, then `S = size * e^{-beta K}`. (The paper's
`k >= 1` gives `e^{-beta (K + 1)}`: too small by `e^{-beta}`.)

PUBLIC: the inputs, threshold, budget, family, betas, radii, `joint`, and the result. PRIVATE: envelope and bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from certify.envelope import Envelope
from certify.errors import PrivacyError
from models.ir import Graph
from privacy import agtr, smooth
from privacy.mechanism import Mechanism, release_vectors
from privacy.query import Query

GRID = 2.0**-45
"""Public rounding grid of the noisy indicators."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Private labels, safe to publish: `labels` int64 (Q,), noisy indicators `scores` float64 (Q, C or 1)."""

    labels: np.ndarray
    scores: np.ndarray
    guarantee: agtr.Guarantee


def classify(
    envelope: Envelope,
    model: Graph | Query,
    features: np.ndarray,
    epsilon: float,
    delta: float = 0.0,
    *,
    threshold: float = 0.0,
    per_query: bool = False,
    family: str | None = None,
    betas=None,
    joint: bool | None = None,
    bits=None,
) -> Labels:
    """Private labels at public inputs `features` (Q, F), in table units.

    `threshold`: public, for a model with one output: the label is 1 where the model's output (in model units: the
    logit of a logistic model) is above it, else 0. A model with several outputs predicts their argmax.
    `epsilon`, `delta`, `per_query`, `family`, `betas`: as for `query.predict`. `joint`: True releases the indicators
    of all inputs as one vector, False those of each input on their own, None by the public rule.

    Guarantees:
    * labels are dp: labels and scores are (epsilon, delta)-DP under the envelope's adjacency;
    * classes share one release: a one-hot vector of C classes pays for C coordinates of one vector, not for C queries;
    * repeated inputs cost nothing.

    Raises CapabilityError, PrivacyError, EnvelopeError, DataError.
    """
    query = model if isinstance(model, Query) else Query.make(envelope, model, (-np.inf, np.inf))
    return labels_from_bounds(
        envelope,
        query.bounds,
        query.prepare(features),
        epsilon,
        delta,
        threshold=threshold,
        per_query=per_query,
        family=family,
        betas=betas,
        joint=joint,
        bits=bits,
    )


def labels_from_bounds(
    envelope,
    bounds,
    queries: np.ndarray,
    epsilon: float,
    delta: float = 0.0,
    *,
    threshold: float = 0.0,
    per_query: bool = False,
    family: str | None = None,
    betas=None,
    joint: bool | None = None,
    bits=None,
) -> Labels:
    """`classify` for any source of output bounds; the arguments are those of `agtr.predict_from_bounds`."""
    rows, inverse, lower, upper, _ = agtr.distinct_bounds(envelope, bounds, queries)
    surely, possibly = indicator_bounds(lower, upper, threshold)
    shape, classes = surely.shape[1:], surely.shape[2]
    if joint is None and getattr(envelope.metadata, "auto", None) is not None:
        joint = False
    whole = classes if per_query else classes * len(rows)
    sizes = {None: tuple(sorted({classes, whole})), True: (whole,), False: (classes,)}[joint]
    terms, rule = agtr.envelope_terms(
        envelope, epsilon, delta, shape, per_query, family, betas, joint, sizes, lambda g: changes(g, classes)
    )
    if "radii" in rule:
        smooth.require_contiguous(rule["radii"])
        by_beta = indicator_smooth_bounds(surely, possibly, terms.mechanism)
    elif terms.mechanism.dim > 1:
        raise PrivacyError(
            "radii: the envelope's radii were chosen on demand, which a vector of class indicators cannot use; "
            "certify with contiguous radii"
        )
    else:
        flat = [side.reshape(len(side), -1) for side in (surely, possibly)]
        one = np.ones(flat[0].shape[1])
        by_beta = {pair.beta: rule["bound"](*flat, one, pair.beta) for pair in terms.mechanism.pairs}
    groups = agtr.Groups(shape, terms.mechanism.dim)
    noisy = release_vectors(groups.cut(surely[0]), by_beta, terms.mechanism, np.array(GRID), bits=bits)
    scores = noisy.values.reshape(shape)[inverse]
    return Labels(decide(scores), scores, agtr.guarantee_of(terms, surely[0].size, (GRID,) * classes))


def indicator_bounds(lower: np.ndarray, upper: np.ndarray, threshold: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Bounds (K+1, M, C) in {0, 1} of the class indicators, from output bounds (K+1, M, O), exact at radius 0.

    One output: C = 1, the indicator of `output > threshold`. Else `surely[k, m, c]` is 1 when class `c` wins for all
    outputs in the box, `possibly` when it may win. PRIVATE.

    Guarantees:
    * indicator bounds are sound: for outputs in the box the winner has `possibly = 1`, others have `surely = 0`;
    * indicator bounds are monotone: larger boxes give smaller `surely` and larger `possibly`;
    * one possible class is a sure one.

    Errors: PrivacyError for a nominal output that is not finite, or bounds out of order.
    """
    lower, upper = np.asarray(lower, np.float64), np.asarray(upper, np.float64)
    if not (np.all(lower <= upper) and np.all(np.isfinite(lower[0])) and np.array_equal(lower[0], upper[0])):
        raise PrivacyError(
            "bounds: out of order or NaN, or not the finite nominal output at radius 0; recompute the envelope"
        )
    if lower.shape[2] == 1:
        if not np.isfinite(threshold):
            raise PrivacyError(f"threshold: {threshold!r} is not a finite number; give the public decision threshold")
        return (lower > threshold).astype(np.float64), (upper > threshold).astype(np.float64)
    classes = lower.shape[2]
    surely, possibly = np.ones(lower.shape), np.ones(lower.shape)
    for c in range(classes):
        for j in range(classes):
            if j != c:  # a tie goes to the lower class
                beats = np.greater_equal if c < j else np.greater
                surely[..., c] *= beats(lower[..., c], upper[..., j])
                possibly[..., c] *= beats(upper[..., c], lower[..., j])
    return surely, possibly


def uncertified(surely: np.ndarray, possibly: np.ndarray) -> np.ndarray:
    """Bool (K+1, M): at this radius more than one label is possible. PRIVATE."""
    return np.any(surely != possibly, axis=-1)


def indicator_smooth_bounds(
    surely: np.ndarray, possibly: np.ndarray, mechanism: Mechanism
) -> dict[float, np.ndarray]:
    """PRIVATE `{beta: S_beta (groups,)}` of the indicators (K+1, M, C), in the mechanism's norm.

    Guarantees: those of `smooth.smooth_bound`; the cross range of one input is at most `size`, however many classes
    are possible.
    """
    classes = surely.shape[2]
    # One record moves one number by 1 (binary), or two (one-hot): which two does not matter to the norm.
    pattern = (np.arange(classes) < min(2, classes)).astype(np.float64)
    cross = uncertified(surely, possibly)[1:, :, None] * pattern
    groups = agtr.Groups(surely.shape[1:], mechanism.dim)
    cross = smooth.norm_outputs(groups.cut(cross), mechanism.norm)
    top = smooth.norm_outputs(groups.cut(pattern), mechanism.norm)
    return {pair.beta: smooth.smooth_bound(cross, top, pair.beta) for pair in mechanism.pairs}


def changes(size: int, classes: int) -> int:
    """How many of `size` indicators one record can move."""
    return size if classes == 1 else 2 * (size // classes)


def decide(scores: np.ndarray) -> np.ndarray:
    """The label of each row of noisy indicators: post-processing."""
    if scores.shape[1] == 1:
        return (scores[:, 0] > 0.5).astype(np.int64)
    return np.argmax(scores, axis=1)

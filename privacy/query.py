"""The query that AGT-R releases: a certified model's prediction, clipped to its public range.

This is where the privacy layer meets the solvers: bounds of predictions over the boxes of an envelope, and the
public ceiling that clipping alone allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from certify._siblings import require
from certify.envelope import Envelope
from certify.errors import EnvelopeError, PrivacyError
from privacy.agtr import Release, least_noise, predict_from_bounds

require("models", "solvers")

from certify.driver import prepare_graph, reach  # noqa: E402
from certify.recipe import Recipe, from_dict  # noqa: E402
from models.ir import Graph  # noqa: E402
from solvers import output_bounds  # noqa: E402
from solvers.errors import UnsupportedWindowError  # noqa: E402
from solvers.relational import output_differences  # noqa: E402


@dataclass(frozen=True, eq=False)
class Query:
    """Predictions of ``graph`` over the boxes of ``envelope``, in model units (those after the target's scaling).

    ``output_range`` is public: two arrays ``(O,)``.  ``recipe`` is None for an envelope that carries none.
    """

    envelope: Envelope
    graph: Graph
    recipe: Recipe | None
    output_range: tuple[np.ndarray, np.ndarray]

    @classmethod
    def make(cls, envelope: Envelope, graph: Graph, output_range: tuple | None = None) -> Query:
        """Join an envelope and the model it was made from.

        ``output_range``: public (lower, upper) in target units, for envelopes whose recipe states none.
        Raises EnvelopeError when model and envelope do not fit, PrivacyError when there is no public range.
        """
        recipe = None if envelope.metadata.recipe is None else from_dict(envelope.metadata.recipe, "envelope: recipe")
        if recipe is not None:
            graph = prepare_graph(graph, recipe)
        else:
            graph = graph.with_trainable([p.name for p in envelope.parameters])
        found = [(p.name, tuple(p.shape)) for p in graph.trainable]
        wanted = [(p.name, tuple(p.shape)) for p in envelope.parameters]
        if found != wanted:
            differs = next((w for w in wanted if w not in found), None) or next(f for f in found if f not in wanted)
            raise EnvelopeError(
                f"parameters: the envelope and the model differ at {differs[0]!r} of shape {differs[1]}; "
                "give the ONNX file that the envelope was made from"
            )
        if output_range is not None:
            ends = [np.broadcast_to(np.asarray(end, np.float64), (graph.outputs,)) for end in output_range]
            if recipe is not None:
                scale, offset = np.asarray(recipe.target.scale), np.asarray(recipe.target.offset)
                ends = [(end - offset) / scale for end in ends]
        elif recipe is not None and recipe.output is not None:
            ends = recipe.output_range(graph.outputs)
        else:
            raise PrivacyError(
                "output_range: the recipe states no [output] range; private predictions need the public range that "
                "they are clipped to before noise is added, so certify with [output] lower and upper"
            )
        return cls(envelope, graph, recipe, (np.array(ends[0]), np.array(ends[1])))

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """Columns of a table of inputs, None for all."""
        return self.recipe.features.names if self.recipe is not None else None

    @property
    def target_names(self) -> list[str]:
        """One name an output."""
        names = self.recipe.target.names if self.recipe is not None else None
        outputs = self.graph.outputs
        return list(names) if names and len(names) == outputs else [f"prediction_{j}" for j in range(outputs)]

    @property
    def unit(self) -> float:
        """Target units a model unit (of the first output)."""
        return float(np.ravel(self.recipe.target.scale)[0]) if self.recipe is not None else 1.0

    def prepare(self, features: np.ndarray) -> np.ndarray:
        """Public inputs ``(M, ...)`` in table units as model inputs ``(M, F)``; raises DataError or PrivacyError."""
        x = np.asarray(features, dtype=np.float64)
        if not x.size:
            raise PrivacyError(f"queries: found an empty table of shape {x.shape}; give at least one input")
        x = self.recipe.prepare_features(x) if self.recipe is not None else x
        x = x.reshape(len(x), -1)
        if x.shape[1] != self.graph.input_features:
            raise PrivacyError(
                f"queries: found {x.shape[1]} values a row, the model takes {self.graph.input_features}; "
                "give the columns it was trained on"
            )
        return x

    def bounds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Private bounds ``(K, M, O)`` of the prediction over the box of each radius, exact at radius 0."""
        lower, upper = self.envelope.stacked()
        return tuple(output_bounds(self.graph, lower, upper, self._shaped(rows), self.envelope.radii))

    def differences(self, rows: np.ndarray) -> np.ndarray | None:
        """Private relational certificate ``(K, C, M, O)`` of the predictions; None for an envelope without one.

        Entry ``k`` bounds how far the predictions of two neighbours within the radius are apart, by class of slots.
        """
        certificate = self.envelope.stacked_difference()
        if certificate is None:
            return None
        try:
            return output_differences(
                self.graph, *self.envelope.stacked(), certificate, self._shaped(rows), self.envelope.radii
            )
        except UnsupportedWindowError:  # another trainer's certificate, of a model for which there is no such rule
            return None

    @cached_property
    def _reach(self) -> tuple[np.ndarray, np.ndarray] | None:
        if self.recipe is None:
            return None
        return reach(self.graph, self.recipe, self.envelope.metadata.slots)

    def ceiling(self, rows: np.ndarray) -> np.ndarray:
        """Public bound ``(M, O)`` of how far any two data sets' clipped predictions can be apart at each input.

        The box that clipping alone allows holds the parameters of every run, whatever the data.
        """
        low, high = self.output_range
        if self._reach is None:
            width = np.broadcast_to(high - low, (len(rows), self.graph.outputs))
        else:
            lower, upper = (end[None] for end in self._reach)
            bounds = output_bounds(self.graph, lower, upper, self._shaped(rows), [self.envelope.metadata.slots])
            width = np.clip(bounds.upper[0], low, high) - np.clip(bounds.lower[0], low, high)
        # Where clipping makes a prediction the same for all data sets the width is zero; a bound must be positive.
        return np.maximum(np.nextafter(width, np.inf), 2.0**-40 * (high - low))

    def restore(self, values: np.ndarray) -> np.ndarray:
        """Released values ``(M, O)`` in target units (post-processing of a release)."""
        return values if self.recipe is None else self.recipe.restore_predictions(values)

    def _shaped(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(len(rows), *self.graph.input_shape)


def noise_floor(query: Query, features: np.ndarray, epsilon: float, delta: float = 0.0, **options) -> np.ndarray:
    """PUBLIC `agtr.least_noise` of a request, ``(M, O)`` for its distinct inputs; arguments as for `predict`.

    Reads the model, the recipe and the envelope's public metadata, never its boxes.  Raises PrivacyError, DataError.
    """
    rows = np.unique(query.prepare(features) + 0.0, axis=0)
    public = query.envelope.metadata
    return least_noise(public, query.ceiling(rows), epsilon, delta, output_range=query.output_range, **options)


def predict(
    envelope: Envelope,
    model: Graph | Query,
    features: np.ndarray,
    epsilon: float,
    delta: float = 0.0,
    *,
    output_range: tuple | None = None,
    per_query: bool = False,
    family: str | None = None,
    betas=None,
    joint: bool | None = None,
) -> Release:
    """Private predictions at public inputs ``features`` ``(M, F)`` in table units, released in target units.

    ``epsilon``, ``delta``: the budget of the whole call, shared equally by the distinct inputs and the outputs; with
    ``per_query`` that of each distinct input.  ``family``: a name in `privacy.noise.FAMILIES`, by default one chosen by
    a public rule.  ``joint``: release all numbers (with ``per_query``: the outputs of each input) as one vector (True),
    each on its own (False), or whichever has less noise by a public rule (None).

    Guarantees: those of `privacy.agtr.predict_from_bounds`.  What is returned may be published; what the call
    reads (envelope) and how long it takes may not.
    Raises CapabilityError for an envelope that is not sound and monotone, PrivacyError, EnvelopeError, DataError.
    """
    query = model if isinstance(model, Query) else Query.make(envelope, model, output_range)
    release = predict_from_bounds(
        envelope,
        query.bounds,
        query.prepare(features),
        epsilon,
        delta,
        output_range=query.output_range,
        ceiling=query.ceiling,
        per_query=per_query,
        family=family,
        betas=betas,
        joint=joint,
        differences=query.differences,
    )
    return Release(query.restore(release.values), release.guarantee)

"""The samplers as a ``BatchSampler`` of a PyTorch ``DataLoader``.

    data = PaddedDataset(dataset, null=(torch.zeros(1, 8, 8), 0))
    loader = DataLoader(data, batch_sampler=BandmfBatchSampler(scheme, coins))
    for (images, labels), real in loader: ...        # real: bool (batch,); gradients of the others count as zero

Convention: padding is the index one past the last example.  A plain data set answers it with IndexError, so a
forgotten mask is found at once (Python's -1 would train on the last example).  A batch is never empty: where nothing
was sampled it is one padding entry, and the step must still be made, with noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch.utils.data

from certify.errors import PrivacyError
from privacy.bandmf.samplers import PADDING, Coins, sampler
from privacy.bandmf.schemes import MultiAttribution, Scheme
from privacy.bandmf.users import UserGraph


class BandmfBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Batches of the scheme as lists of int; ``position`` counts the steps handed out.

    ``steps_per_pass``: how many steps one pass over the loader makes (None: all that are left).  A next pass goes on
    where the last one ended, since the guarantee is for one run of ``scheme.steps`` steps, not for repetitions of it.

    Guarantees:
    * passes do not repeat: a pass after the last step raises PrivacyError;
    * a broken pass is noticed: after a pass that was left early the trainer has to `seek`, because a loader may have
      fetched more batches than were trained on.
    """

    def __init__(
        self,
        scheme: Scheme,
        coins: Coins,
        *,
        graph: UserGraph | None = None,
        start: int = 0,
        steps_per_pass: int | None = None,
    ):
        if steps_per_pass is not None and steps_per_pass < 1:
            raise PrivacyError(f"steps_per_pass: found {steps_per_pass}; a whole number of at least 1 is required")
        sampler(scheme, coins, graph=graph, start=start)
        self._scheme, self._coins, self._graph, self._pass = scheme, coins, graph, steps_per_pass
        self._padding = graph.examples if isinstance(scheme, MultiAttribution) else scheme.examples
        self.seek(start)

    def seek(self, step: int) -> None:
        """Go on with this step: the number of steps that the model has made (0-based number of the next)."""
        self._batches = sampler(self._scheme, self._coins, graph=self._graph, start=step)
        self.position = step
        self._open = False

    def __len__(self) -> int:
        left = self._scheme.steps - self.position
        return left if self._pass is None else min(left, self._pass)

    def __iter__(self) -> Iterator[list[int]]:
        if self._open:
            raise PrivacyError("batches: the last pass was left early; call seek with the number of steps trained")
        if self.position == self._scheme.steps:
            raise PrivacyError(f"batches: all {self._scheme.steps} steps are drawn; more steps need another account")
        self._open = True
        for _ in range(len(self)):
            batch = next(self._batches)
            self.position += 1
            yield np.where(batch == PADDING, self._padding, batch).tolist() or [self._padding]
        self._open = False


class PaddedDataset(torch.utils.data.Dataset):
    """``(item, True)`` for the items of a data set, ``(null, False)`` for the index one past the last.

    ``null``: public, of the items' structure and shapes, for example zeros.
    """

    def __init__(self, dataset: torch.utils.data.Dataset, null):
        self._dataset, self._null = dataset, null

    def __len__(self) -> int:
        return len(self._dataset) + 1

    def __getitem__(self, index: int):
        if not 0 <= index < len(self):
            raise IndexError(f"index {index}: examples are numbered from 0 and padding is {len(self._dataset)}")
        if index == len(self._dataset):
            return self._null, False
        return self._dataset[index], True

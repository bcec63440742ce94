"""BandMF training in PyTorch: a private step for any torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from certify.errors import PrivacyError
from privacy.bandmf.noise import Journal, NoiseStream, SecureNormals, SeededNormals
from privacy.bandmf.strategy import Strategy

_GRID = 2.0**-40  # of the clip norm
_LARGEST_BATCH = 1 << 22  # sums of that many clipped gradients fit into 62 bits
_SHRINK = 1.0 - 2.0**-30  # more than the rounding errors of a norm and a product in float64

PerSample = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""``(x, y) -> gradients``: one tensor ``(batch, *shape)`` for each trained parameter, in the optimizer's order."""


class PrivateOptimizer:
    """Clips per-sample gradients, adds the noise of a strategy, and lets ``optimizer`` take its step.

    ``loss_fn(output, target)`` is the loss of a batch of one (or a mean over the batch).  ``clip``: l2 norm of one
    example's whole gradient.  ``noise_multiplier``: of the accountant, the standard deviation of ``Z`` for clip norm 1.
    ``expected_batch``: the scheme's expected batch size, PUBLIC and the same in every step; dividing by the true size
    would reveal it.  ``microbatch``: examples whose gradients are held in memory at once.  ``journal``: of a run that
    is to survive an interruption (`privacy.bandmf.noise`).  ``per_sample``: another source of per-sample gradients,
    say `opacus_gradients`; it must compute each from its example alone.

    The privacy is what the accountant says for the scheme that drew the batches, the strategy and the noise
    multiplier, under zero-out adjacency.  It covers all models along the way.

    Guarantees:
    * one example changes the sums by at most the clip norm: gradients are clipped in float64, then rounded
      towards zero to a grid of 2^-40 of the clip norm and added as integers, exactly, in any order and microbatches;
    * an interrupted batch is dropped whole, so that no example is added twice when it is given again;
    * padding changes nothing: masked examples count as zero gradients, as do gradients that are not finite;
    * the step is post-processing of the noisy sums: the inner optimizer sees nothing else.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        strategy: Strategy,
        *,
        noise_multiplier: float,
        clip: float,
        expected_batch: float,
        microbatch: int = 256,
        journal: Journal | None = None,
        per_sample: PerSample | None = None,
        source: SecureNormals | SeededNormals | None = None,
    ):
        for name, value in (("clip", clip), ("expected_batch", expected_batch), ("microbatch", microbatch)):
            if not (math.isfinite(value) and value > 0):
                raise PrivacyError(f"{name}: found {value!r}; a positive number is required")
        self.optimizer, self.clip, self.expected_batch, self.microbatch = optimizer, clip, expected_batch, microbatch
        self._model, self._parameters = model, _parameters(optimizer)
        known = {id(p) for p in model.parameters()}
        if not all(id(p) in known for p in self._parameters):
            raise PrivacyError("optimizer: found a parameter that is not the model's; build it from the model's own")
        self._per_sample = per_sample or functional_gradients(model, loss_fn, self._parameters)
        shapes = [tuple(p.shape) for p in self._parameters]
        self.noise = NoiseStream(strategy, shapes, noise_multiplier * clip, journal, source)
        self._clear()

    def _clear(self) -> None:
        self._seen = 0
        self._sums = [torch.zeros(p.shape, dtype=torch.int64, device=p.device) for p in self._parameters]

    def accumulate(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> None:
        """Add examples to the batch of the coming step.  ``mask`` ``(batch,)``: False marks padding."""
        if mask is not None and mask.shape != x.shape[:1]:
            raise PrivacyError(f"mask: found shape {tuple(mask.shape)} for a batch of {len(x)}; one entry per example")
        if self._seen + len(x) > _LARGEST_BATCH:
            raise PrivacyError(f"batch: found more than {_LARGEST_BATCH} examples in one step; use smaller batches")
        _refuse_mixing(self._model)
        try:
            self._seen += len(x)
            for part in range(0, len(x), self.microbatch):
                chunk = slice(part, part + self.microbatch)
                self._add(x[chunk], y[chunk], None if mask is None else mask[chunk])
        except BaseException:
            self._clear()
            raise

    def _add(self, x: Tensor, y: Tensor, mask: Tensor | None) -> None:
        gradients = self._per_sample(x, y)
        for p, g in zip(self._parameters, gradients, strict=True):
            if g is None or g.shape != (len(x), *p.shape):
                raise PrivacyError(
                    f"per_sample: found {'no gradient' if g is None else tuple(g.shape)} for a parameter of shape "
                    f"{tuple(p.shape)} and {len(x)} examples; one gradient for every example is required"
                )
        for total, added in zip(self._sums, clipped_sums(gradients, self.clip, mask), strict=True):
            total += added

    def step(self, x: Tensor | None = None, y: Tensor | None = None, mask: Tensor | None = None) -> None:
        """One private step on the examples accumulated so far and on ``(x, y)``, if given.

        An empty batch is a step too: its noise is part of the guarantee.
        """
        if x is not None:
            self.accumulate(x, y, mask)
        if [id(p) for p in _parameters(self.optimizer)] != [id(p) for p in self._parameters]:
            raise PrivacyError("optimizer: its parameters changed since the noise was set up; leave them as they were")
        sums = self._sums
        self._clear()
        noisy = self.noise.release([total.cpu().double().numpy() * (self.clip * _GRID) for total in sums])
        for p, gradient in zip(self._parameters, noisy, strict=True):
            p.grad = torch.from_numpy(gradient / self.expected_batch).to(p)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict:
        """State of the inner optimizer and of the noise, for `torch.save` beside the model's.  PRIVATE."""
        if self._seen:
            raise PrivacyError("state_dict: found examples that await their step; call step first")
        noise = self.noise.state_dict()
        noise["rings"] = [torch.from_numpy(ring) for ring in noise["rings"]]
        return {"optimizer": self.optimizer.state_dict(), "noise": noise}

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict`; examples that await their step are dropped."""
        noise = state["noise"]
        self.noise.load_state_dict({**noise, "rings": [ring.numpy() for ring in noise["rings"]]})
        self.optimizer.load_state_dict(state["optimizer"])
        self._clear()


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _refuse_mixing(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and not _one_by_one(module):
            raise PrivacyError(
                f"model: found {type(module).__name__} {name!r}, which mixes the examples of a batch: no clipping "
                "bounds the effect of one; use GroupNorm or LayerNorm, or freeze it with eval()"
            )


def _one_by_one(module: nn.Module) -> bool:
    """Instance normalisation without running statistics sees one example at a time."""
    return isinstance(module, nn.modules.instancenorm._InstanceNorm) and not module.track_running_stats


def functional_gradients(model: nn.Module, loss_fn, parameters: Sequence[nn.Parameter]) -> PerSample:
    """Per-sample gradients by ``torch.func``: the gradient of a batch of one, vectorised."""
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [names[id(p)] for p in parameters]

    def loss(values, others, x, y):
        output = torch.func.functional_call(model, {**others, **values}, (x.unsqueeze(0),))
        return loss_fn(output, y.unsqueeze(0))

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, None, 0, 0), randomness="different")

    def per_sample(x: Tensor, y: Tensor) -> list[Tensor]:
        state = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
        values = {name: state.pop(name) for name in trained}
        found = gradients(values, state, x, y)
        return [found[name] for name in trained]

    return per_sample


def opacus_gradients(model: nn.Module, loss_fn, parameters: Sequence[nn.Parameter]) -> PerSample:
    """Per-sample gradients by Opacus: ``model`` is an ``opacus.GradSampleModule`` with ``loss_reduction="sum"``.

    ``loss_fn`` sums over the batch.  For layers that ``torch.func`` cannot vectorise.
    """

    def per_sample(x: Tensor, y: Tensor) -> list[Tensor]:
        model.zero_grad()
        loss_fn(model(x), y).backward()
        found = [p.grad_sample for p in parameters]
        model.zero_grad()
        return found

    return per_sample


def clipped_sums(gradients: Sequence[Tensor], clip: float, mask: Tensor | None = None) -> list[Tensor]:
    """Sums over the batch of gradients clipped to norm ``clip``, int64, in units of ``2^-40 clip``."""
    squares = [g.detach().double().unsqueeze(-1).flatten(1).square().sum(dim=1) for g in gradients]
    norms = torch.stack(squares).sum(dim=0).sqrt()
    counted = norms.isfinite() if mask is None else norms.isfinite() & mask.to(norms.device, torch.bool)
    factor = torch.where(counted, torch.clamp(clip / norms, max=1.0), 0.0) * (_SHRINK / (clip * _GRID))
    sums = []
    for g in gradients:
        shape = [len(g)] + [1] * (g.dim() - 1)
        cleaned = torch.where(counted.view(shape), g.detach().double(), 0.0)
        sums.append((cleaned * factor.view(shape)).to(torch.int64).sum(dim=0))
    return sums

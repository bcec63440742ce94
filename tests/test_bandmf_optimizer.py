"""The private optimizer: sensitivity of the clipped sums, masks, microbatches, restarts, and plain SGD as its limit."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certify.errors import CheckpointError, PrivacyError
from privacy.bandmf.noise import Journal, SeededNormals
from privacy.bandmf.optimize import optimal_toeplitz
from privacy.bandmf.sampler_coins import SeededCoins
from privacy.bandmf.samplers import sampler
from privacy.bandmf.schemes import BMinSep
from privacy.bandmf.strategy import Strategy

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from privacy.bandmf.optimizer import (  # noqa: E402
    _GRID,
    PrivateOptimizer,
    clipped_sums,
    functional_gradients,
    opacus_gradients,
)

LOSS = nn.functional.cross_entropy


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def small_data(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)


def private(model, optimizer=None, *, steps=6, bands=3, noise_multiplier=1e-12, clip=1.0, expected_batch=8.0, **more):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    strategy = optimal_toeplitz(steps, bands)
    more.setdefault("source", SeededNormals(3))
    terms = {"noise_multiplier": noise_multiplier, "clip": clip, "expected_batch": expected_batch}
    return PrivateOptimizer(optimizer, model, LOSS, strategy, **terms, **more)


def values(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def one_by_one(model, x, y):
    """Gradients by a loop of ordinary backward passes: the second implementation."""
    found = []
    for a, b in zip(x, y, strict=True):
        model.zero_grad()
        LOSS(model(a[None]), b[None]).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    return [torch.stack(column) for column in zip(*found, strict=True)]


# --- one example changes the sums by at most the clip norm ---


def gradients_of(seed, batch, shapes, size, special):
    rng = np.random.default_rng(seed)
    found = [torch.from_numpy(rng.normal(size=(batch, *shape)) * size).float() for shape in shapes]
    for g in found:
        if special is not None and g.numel():
            g.view(-1)[rng.integers(g.numel())] = special
    return found


def norm_of(integers, clip):
    return np.sqrt(sum(float((i.double().numpy() ** 2).sum()) for i in integers)) * clip * _GRID


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.lists(st.sampled_from([(), (1,), (3,), (2, 2), (0,), (40,)]), min_size=1, max_size=3),
    st.sampled_from([1e-30, 1e-6, 0.1, 1.0, 1e3, 1e30]),
    st.sampled_from([None, 0.0, np.nan, np.inf, -np.inf, 3e38, 1e-45]),
    st.sampled_from([1e-3, 1.0, 0.7, 1e4]),
)
def test_one_example_changes_the_sums_by_at_most_the_clip_norm(seed, batch, shapes, size, special, clip):
    gradients = gradients_of(seed, batch, shapes, size, special)
    whole = clipped_sums(gradients, clip)
    for left_out in range(batch):
        mask = torch.arange(batch) != left_out
        without = clipped_sums(gradients, clip, mask)
        removed = clipped_sums([torch.cat([g[:left_out], g[left_out + 1 :]]) for g in gradients], clip)
        assert all(torch.equal(a, b) for a, b in zip(without, removed, strict=True))
        assert norm_of([a - b for a, b in zip(whole, without, strict=True)], clip) <= clip


@pytest.mark.parametrize("clip", [1e-3, 1.0, 0.7])
def test_clipping_leaves_room_for_rounding_errors_of_a_norm(clip):
    (total,) = clipped_sums([torch.tensor([[3e5]])], clip)
    assert 2.0**40 * (1.0 - 2.0**-29) < total.item() < 2.0**40 * (1.0 - 2.0**-31)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1e-3, 1.0, 50.0]), st.sampled_from([0.02, 1.0, 30.0]))
def test_clipping_scales_to_the_norm_and_no_further(seed, clip, size):
    gradients = gradients_of(seed, 5, [(3, 2), (4,)], size, None)
    flat = torch.cat([g.double().flatten(1) for g in gradients], dim=1)
    norms = flat.norm(dim=1, keepdim=True)
    expected = (flat * torch.clamp(clip / norms, max=1.0)).sum(dim=0)
    found = torch.cat([s.flatten() for s in clipped_sums(gradients, clip)]).double() * clip * _GRID
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9 * clip)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.permutations(range(7)), st.integers(1, 7))
def test_sums_do_not_depend_on_order_or_microbatches(seed, order, part):
    gradients = gradients_of(seed, 7, [(3, 2), (4,)], 1.0, None)
    whole = clipped_sums(gradients, 1.0)
    shuffled = [g[list(order)] for g in gradients]
    pieces = [clipped_sums([g[i : i + part] for g in shuffled], 1.0) for i in range(0, 7, part)]
    for total, parts in zip(whole, zip(*pieces, strict=True), strict=True):
        assert torch.equal(total, sum(parts))


# --- the step ---


def test_per_sample_gradients_are_those_of_one_example_each():
    model, (x, y) = small_model(), small_data(9)
    found = functional_gradients(model, LOSS, list(model.parameters()))(x, y)
    for a, b in zip(found, one_by_one(model, x, y), strict=True):
        torch.testing.assert_close(a, b)


def test_opacus_gives_the_same_gradients():
    opacus = pytest.importorskip("opacus")
    model, (x, y) = small_model(), small_data(9)
    expected = one_by_one(model, x, y)
    wrapped = opacus.GradSampleModule(model, loss_reduction="sum")

    def summed(output, target):
        return LOSS(output, target, reduction="sum")

    source = opacus_gradients(wrapped, summed, list(wrapped.parameters()))
    for a, b in zip(source(x, y), expected, strict=True):
        torch.testing.assert_close(a, b)
    optimizer = private(wrapped, per_sample=source, microbatch=4)
    before = values(wrapped)
    optimizer.step(x, y)
    assert not torch.equal(before, values(wrapped))


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.01),
    lambda p: torch.optim.Adam(p, lr=0.05),
    lambda p: torch.optim.AdamW([{"params": list(p)}], lr=0.05),
])  # fmt: skip
def test_without_noise_and_clipping_it_is_the_inner_optimizer(make):
    ours, plain = small_model(), small_model()
    inner = make(plain.parameters())
    optimizer = private(ours, make(ours.parameters()), clip=1e3, noise_multiplier=1e-15)
    for step in range(6):
        x, y = small_data(8, seed=step)
        optimizer.step(x, y)
        inner.zero_grad()
        LOSS(plain(x), y).backward()
        inner.step()
    torch.testing.assert_close(values(ours), values(plain), rtol=1e-4, atol=1e-5)


def test_the_noise_is_that_of_the_strategy_over_the_expected_batch():
    model, source = small_model(), SeededNormals(8)
    optimizer = private(
        model, torch.optim.SGD(model.parameters(), lr=1.0), source=source, noise_multiplier=2.0, clip=0.5
    )
    start, sizes = values(model), [p.numel() for p in model.parameters()]
    x, y = small_data(0)
    moves = []
    for _ in range(6):
        optimizer.step(x, y)
        moves.append(start - values(model))
    z = np.stack([np.concatenate([source.row(i, k, size) for k, size in enumerate(sizes)]) for i in range(6)])
    c = optimizer.noise.strategy.coefficients
    matrix = sum(c[d] * np.eye(6, k=-d) for d in range(3))
    expected = np.cumsum(np.linalg.solve(matrix, z), axis=0) * (2.0 * 0.5 / 8.0)
    torch.testing.assert_close(torch.stack(moves).double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing():
    x, y = small_data(8)
    padded_x = torch.cat([x, torch.full((4, 4), torch.nan), 1e3 * torch.ones(2, 4)])
    padded_y = torch.cat([y, torch.zeros(6, dtype=torch.long)])
    mask = torch.arange(14) < 8
    models = [small_model(), small_model(), small_model()]
    private(models[0]).step(x, y)
    private(models[1], microbatch=5).step(padded_x, padded_y, mask)
    torch.testing.assert_close(values(models[0]), values(models[1]), rtol=1e-6, atol=1e-7)
    private(models[2]).step(padded_x, padded_y)
    assert not torch.allclose(values(models[0]), values(models[2]), atol=1e-3)


def test_microbatches_and_accumulation_make_the_same_step():
    x, y = small_data(20)
    models = [small_model() for _ in range(3)]
    private(models[0]).step(x, y)
    private(models[1], microbatch=3).step(x, y)
    optimizer = private(models[2])
    optimizer.accumulate(x[:6], y[:6])
    optimizer.accumulate(x[6:6], y[6:6])
    optimizer.step(x[6:], y[6:])
    for other in models[1:]:
        torch.testing.assert_close(values(models[0]), values(other), rtol=1e-6, atol=1e-7)
    optimizer.step()
    assert optimizer.noise.step == 2


@pytest.mark.parametrize("where", ["gradients", "noise"])
def test_an_interrupted_batch_is_dropped_whole(where, monkeypatch):
    x, y = small_data(8)
    models = [small_model(), small_model()]
    private(models[0]).step(x, y)
    optimizer = private(models[1], microbatch=3)
    calls = 0

    def struck(*arguments):
        nonlocal calls
        calls += 1
        if calls == (3 if where == "gradients" else 1):
            raise KeyboardInterrupt
        return original(*arguments)

    target, name = (optimizer, "_per_sample") if where == "gradients" else (optimizer.noise, "release")
    original = getattr(target, name)
    monkeypatch.setattr(target, name, struck)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(x, y)
    monkeypatch.undo()
    optimizer.step(x, y)
    torch.testing.assert_close(values(models[0]), values(models[1]), rtol=1e-6, atol=1e-7)


def test_frozen_parameters_stay():
    model, (x, y) = small_model(), small_data(8)
    first = values(model[0]).clone()
    private(model, torch.optim.SGD(model[2].parameters(), lr=0.5)).step(x, y)
    assert torch.equal(first, values(model[0]))


def test_half_precision_models_are_trained():
    model, (x, y) = small_model().to(torch.bfloat16), small_data(8)
    private(model).step(x.to(torch.bfloat16), y)
    assert values(model).isfinite().all() and values(model).dtype == torch.bfloat16


def test_dropout_is_drawn_for_every_example():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    gradients = functional_gradients(model, LOSS, list(model.parameters()))(torch.ones(64, 4), torch.zeros(64).long())
    assert len(torch.unique(gradients[0].flatten(1) != 0, dim=0)) > 4


# --- restart ---

SCHEME = BMinSep(steps=6, examples=40, batch=8.0, separation=3)


def run(model, optimizer, until, x, y):
    for batch in sampler(SCHEME, SeededCoins(5), start=optimizer.noise.step):
        if optimizer.noise.step == until:
            return
        optimizer.step(x[batch], y[batch])


def test_a_restarted_run_is_the_same_run(tmp_path):
    x, y = small_data(40)

    def build():
        model = small_model()
        journal = Journal(tmp_path / "run.journal")
        return model, private(
            model, torch.optim.Adam(model.parameters(), lr=0.1), journal=journal, source=None, noise_multiplier=1.0
        )

    model, optimizer = build()
    run(model, optimizer, 2, x, y)
    torch.save({"model": model.state_dict(), **optimizer.state_dict()}, tmp_path / "state.pt")
    run(model, optimizer, 5, x, y)  # lost: steps 2, 3 and 4 were released but not saved
    again, optimizer = build()
    state = torch.load(tmp_path / "state.pt")
    again.load_state_dict(state["model"])
    optimizer.load_state_dict(state)
    run(again, optimizer, 5, x, y)
    assert torch.equal(values(model), values(again))

    other, optimizer = build()
    other.load_state_dict(state["model"])
    optimizer.load_state_dict(state)
    with pytest.raises(PrivacyError, match="step 2: its noise was already released with other gradients"):
        optimizer.step(x[:8], y[:8])


def test_a_state_between_examples_and_their_step_is_refused():
    model, (x, y) = small_model(), small_data(8)
    optimizer = private(model)
    optimizer.accumulate(x, y)
    with pytest.raises(PrivacyError, match="call step first"):
        optimizer.state_dict()
    optimizer.step()
    with pytest.raises(CheckpointError, match="another journal"):
        private(model).load_state_dict(optimizer.state_dict())


# --- what is refused ---


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(5), nn.InstanceNorm1d(5, track_running_stats=True)])
def test_layers_that_mix_examples_are_refused(layer):
    model, (x, y) = nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3)), small_data(8)
    optimizer = private(model)
    with pytest.raises(PrivacyError, match="mixes the examples of a batch"):
        optimizer.step(x, y)
    assert optimizer.noise.step == 0


def test_frozen_batch_norm_and_other_norms_are_taken():
    x, y = small_data(8)
    for layer in (nn.BatchNorm1d(5).eval(), nn.LayerNorm(5), nn.GroupNorm(1, 5)):
        private(nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3))).step(x, y)


@pytest.mark.parametrize("field", ["clip", "expected_batch", "noise_multiplier", "microbatch"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_numbers_that_are_not_positive_are_refused(field, value):
    words = "scale" if field == "noise_multiplier" else field
    with pytest.raises(PrivacyError, match=f"{words}: found"):
        private(small_model(), **{field: value})


def test_parameters_without_noise_are_refused():
    model, (x, y) = small_model(), small_data(4)
    with pytest.raises(PrivacyError, match="not the model's"):
        private(model, torch.optim.SGD(small_model().parameters(), lr=0.1))
    inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = private(model, inner)
    inner.add_param_group({"params": model[2].parameters()})
    with pytest.raises(PrivacyError, match="its parameters changed"):
        optimizer.step(x, y)


@pytest.mark.parametrize("wrong", [lambda g: g.sum(dim=0), lambda g: g[:-1], lambda g: None])
def test_gradients_that_are_not_per_sample_are_refused(wrong):
    model, (x, y) = small_model(), small_data(4)
    right = functional_gradients(model, LOSS, list(model.parameters()))
    optimizer = private(model, per_sample=lambda a, b: [wrong(g) for g in right(a, b)])
    with pytest.raises(PrivacyError, match="one gradient for every example"):
        optimizer.step(x, y)


def test_masks_that_do_not_fit_and_steps_beyond_the_last_are_refused():
    model, (x, y) = small_model(), small_data(4)
    optimizer = private(model, steps=1, bands=1)
    with pytest.raises(PrivacyError, match="one entry per example"):
        optimizer.step(x, y, torch.ones(3, dtype=torch.bool))
    optimizer.step(x, y)
    with pytest.raises(PrivacyError, match="the strategy has 1 steps"):
        optimizer.step(x, y)


def test_identity_is_dp_sgd():
    model, (x, y) = small_model(), small_data(8)
    source = SeededNormals(1)
    start = values(model)
    PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model,
        LOSS,
        Strategy.identity(2),
        noise_multiplier=1.5,
        clip=0.1,
        expected_batch=4.0,
        source=source,
    ).step(x, y)
    gradients = [g.double() for g in one_by_one(small_model(), x, y)]
    norms = torch.cat([g.flatten(1) for g in gradients], dim=1).norm(dim=1)
    factor = torch.clamp(0.1 / norms, max=1.0)
    expected = []
    for k, g in enumerate(gradients):
        noise = torch.from_numpy(source.row(0, k, g[0].numel())) * 0.15
        expected.append(((g.flatten(1) * factor[:, None]).sum(dim=0) + noise) / 4.0)
    torch.testing.assert_close((start - values(model)).double(), torch.cat(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_digits_example_trains(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples" / "bandmf")
    digits = importlib.import_module("digits")
    method = digits.METHODS["BandMF, b-min-sep"]
    short = replace(method, scheme=replace(method.scheme, steps=128), strategy=optimal_toeplitz(128, digits.BANDS))
    accuracy = digits.train(short, 1e-6, seed=0)
    assert len(accuracy) == 128 // digits.EVALUATE_EVERY and accuracy[-1] > 0.8
    assert digits.train(short, 1e3, seed=0)[-1] < 0.5

"""Compiled loops of the integer Rényi tilt: joint states of the replicas, backward sums, forward draws, likelihoods.

A *replica* is a copy of the participation chain. Its type at a step is 0 when it is available and
`1 + (lock - 1) * per_user + (m - 1)` when it is barred for the next `lock` steps after taking part with multiplicity
`m`; one step lowers a type by `per_user` (not below 0). Replicas are exchangeable, so a joint state is the sorted tuple
of types. States without an available replica are skipped by jumping ahead: a stored state is the sorted tuple of the
other `order - 1` types beside one that is 0, numbered in colexicographic order.

An *action* says how many available replicas take part with multiplicity 1, ..., per_user. Mathematics:
docs/bandmf_tilt.md.
"""

import math

import numpy as np
from numba import njit

LANES = 32
# of partial likelihood ratios: a gain that underflows (2e-308) times HIGHEST is below 1e-17 LOWEST
LOWEST, HIGHEST = 1e-190, 1e100


@njit(nogil=True, cache=True)
def list_states(alphabet, size, count):
    """All sorted tuples of `size` types below `alphabet`, int32 `(count, size)`, in the order of `_rank`."""
    states = np.zeros((count, size), np.int32)
    for s in range(1, count):
        states[s] = states[s - 1]
        r = 0
        while r + 1 < size and states[s, r] == states[s, r + 1]:
            r += 1
        states[s, r] += 1
        states[s, :r] = 0
    return states


@njit(nogil=True, cache=True)
def _rank(replicas, stride, choose):
    """Jump until a replica is available: `(number of the state then, steps to wait)`; `replicas` sorted types."""
    wait = (replicas[0] + stride - 1) // stride
    number = 0
    for r in range(1, len(replicas)):
        number += choose[r, max(replicas[r] - wait * stride, 0)]
    return number, wait


@njit(nogil=True, cache=True)
def list_successors(states, available, actions, taking, separation, choose):
    """State and extra waiting steps after every action, int32 `(states, actions)` each.

    `actions[a, m - 1]` replicas take part with multiplicity m, `taking[a]` in all; actions come sorted by `taking`.
    """
    stride = actions.shape[1]
    order = states.shape[1] + 1
    following = np.zeros((len(states), len(actions)), np.int32)
    waiting = np.zeros((len(states), len(actions)), np.int32)
    replicas = np.zeros(order, np.int32)
    for s in range(len(states)):
        for a in range(len(actions)):
            if taking[a] > available[s]:
                break
            at = available[s] - taking[a]
            replicas[:at] = 0
            for r in range(available[s] - 1, order - 1):
                replicas[at] = max(states[s, r] - stride, 0)
                at += 1
            for m in range(1, stride + 1):
                for _ in range(actions[a, m - 1]):
                    replicas[at] = (separation - 2) * stride + m if separation > 1 else 0
                    at += 1
            following[s, a], waiting[s, a] = _rank(replicas, stride, choose)
    return following, waiting


@njit(nogil=True, cache=True)
def list_starts(start, order, stride, choose, count):
    """All joint starts of the replicas: state, first step with an available one, probability; `(count,)` each.

    `start[h]` is the probability that a chain is first available at step h. Earlier participations are not in the
    output, and `coupling` at such a distance is 0, so the multiplicity in the type does not matter.
    """
    number = np.zeros(count, np.int32)
    when = np.zeros(count, np.int32)
    probability = np.zeros(count)
    locks = np.zeros(order, np.int32)
    replicas = np.zeros(order, np.int32)
    for c in range(count):
        weight = 1.0
        run = 0
        for r in range(order):
            run = run + 1 if r and locks[r] == locks[r - 1] else 1
            weight *= start[locks[r]] * (r + 1) / run
            replicas[r] = 1 + (locks[r] - 1) * stride if locks[r] else 0
        number[c], when[c] = _rank(replicas, stride, choose)
        probability[c] = weight
        r = 0
        while r + 1 < order and locks[r] == locks[r + 1]:
            r += 1
        locks[r] += 1
        locks[:r] = 0
    return number, when, probability


@njit(nogil=True, cache=True)
def _pull(states, coupling, s, i):
    """exp of the interaction of one participation at step i with the barred replicas of state s."""
    product = 1.0
    for r in range(states.shape[1]):
        product *= coupling[i, states[s, r]]
    return product


@njit(nogil=True, cache=True)
def backward(table, steps, states, available, following, waiting, coupling, chance, multiplicity, allowed):
    """Fill the partition sums of steps `steps - 1, ..., 0`.

    `table` `(rows, states)`, float64 or float32: step i lies in row `i % rows`; beyond the last step the rows hold 1.
    `coupling[i, type]` = exp(K_i(distance) m); `chance[i, r, a]` = probability of action a with r available replicas,
    times the interaction among those that take part; `multiplicity[a]` their total; `allowed[r]` the number of actions
    that r available replicas can take.
    """
    rows, count = table.shape
    row_after = np.zeros(waiting.max() + 1, np.int64)
    powers = np.ones(multiplicity.max() + 1)
    for i in range(steps - 1, -1, -1):
        for wait in range(len(row_after)):
            row_after[wait] = (i + 1 + wait) % rows
        for s in range(count):
            r = available[s]
            pull = _pull(states, coupling, s, i)
            for m in range(1, r * (len(powers) - 1) // (states.shape[1] + 1) + 1):
                powers[m] = powers[m - 1] * pull
            total = 0.0
            for a in range(allowed[r]):
                weight = chance[i, r, a]
                if weight > 0.0:
                    total += weight * powers[multiplicity[a]] * table[row_after[waiting[s, a]], following[s, a]]
            table[i % rows, s] = total


@njit(nogil=True, cache=True)
def _weigh(table, i, s, states, available, following, waiting, coupling, chance, multiplicity, allowed, weights):
    """Unnormalised law of the actions of state s at step i, into `weights`; returns the share of doing nothing."""
    r = available[s]
    pull = _pull(states, coupling, s, i)
    power = 1.0
    reached = 0
    taken = 0.0
    for a in range(allowed[r]):
        if multiplicity[a] < reached:
            power = 1.0
            reached = 0
        while reached < multiplicity[a]:
            power *= pull
            reached += 1
        weights[a] = 0.0
        if chance[i, r, a] > 0.0:
            weights[a] = chance[i, r, a] * power * table[i + 1 + waiting[s, a], following[s, a]]
        if a:
            taken += weights[a]
    return weights[0] / (weights[0] + taken)


@njit(nogil=True, cache=True)
def draw(
    table, steps, state, when, states, available, following, waiting, coupling, chance, multiplicity, allowed, rng
):
    """Draw participations of all replicas together from the tilted law, for many samples, step by step.

    `state`, `when` `(samples,)`: joint start of each sample (overwritten). Returns sample, step, total multiplicity of
    every spike, int32 `(3, spikes)`, sorted by step. One uniform number decides when the next spike comes, another
    which action it is.
    """
    samples = len(state)
    spikes = 0
    found = np.empty((3, 16 * samples + 16), np.int32)
    threshold = np.empty(samples)
    survival = np.ones(samples)
    for k in range(samples):
        threshold[k] = rng.random()
    weights = np.empty(len(multiplicity))
    for i in range(steps):
        idle = _weigh(
            table, i, 0, states, available, following, waiting, coupling, chance, multiplicity, allowed, weights
        )  # state 0, all available, is the commonest
        for k in range(samples):
            if when[k] != i:
                continue
            s = state[k]
            if s:
                survival[k] *= _weigh(
                    table, i, s, states, available, following, waiting, coupling, chance, multiplicity, allowed, weights
                )
            else:
                survival[k] *= idle
            chosen = 0
            if threshold[k] >= survival[k]:
                _weigh(
                    table, i, s, states, available, following, waiting, coupling, chance, multiplicity, allowed, weights
                )
                actions = allowed[available[s]]
                left = rng.random() * weights[1:actions].sum()
                for a in range(1, actions):
                    if weights[a] > 0.0:
                        chosen = a
                        left -= weights[a]
                        if left < 0.0:
                            break
                threshold[k] = rng.random()
                survival[k] = 1.0
                if spikes == found.shape[1]:
                    larger = np.empty((3, 2 * spikes), np.int32)
                    larger[:, :spikes] = found
                    found = larger
                found[0, spikes] = k
                found[1, spikes] = i
                found[2, spikes] = multiplicity[chosen]
                spikes += 1
            state[k] = following[s, chosen]
            when[k] = i + 1 + waiting[s, chosen]
    return found[:, :spikes].copy()


@njit(nogil=True, cache=True)
def add_spikes(y, columns, spikes, first):
    """Add `multiplicity * column` of every spike to its lane `sample - first` of `y` `(>= steps, LANES)`."""
    for j in range(spikes.shape[1]):
        k, i = spikes[0, j] - first, spikes[1, j]
        for d in range(min(columns.shape[1], len(columns) - i)):
            y[i + d, k] += spikes[2, j] * columns[i, d]


@njit(nogil=True, cache=True, fastmath={"contract"})
def _correlate(y, c, dot):
    """`dot[k] = sum_d c[d] y[d, k]`, eight terms at a time so that the sums stay in registers."""
    dot[:] = 0.0
    whole = len(c) - len(c) % 8
    for d in range(0, whole, 8):
        c0, c1, c2, c3, c4, c5, c6, c7 = c[d], c[d + 1], c[d + 2], c[d + 3], c[d + 4], c[d + 5], c[d + 6], c[d + 7]
        for k in range(LANES):
            dot[k] += (
                c0 * y[d, k]
                + c1 * y[d + 1, k]
                + c2 * y[d + 2, k]
                + c3 * y[d + 3, k]
                + c4 * y[d + 4, k]
                + c5 * y[d + 5, k]
                + c6 * y[d + 6, k]
                + c7 * y[d + 7, k]
            )
    for d in range(whole, len(c)):
        for k in range(LANES):
            dot[k] += c[d] * y[d, k]


@njit(nogil=True, cache=True, fastmath={"contract"})
def log_ratios(y, columns, half_norms, law, start):
    """ln L of `LANES` outputs in units of the noise, `y` `(steps + bands, LANES)`; NaN where a float ran out of
    range.

    `law[m]`: probability of multiplicity m when available; `start` as in `list_starts`; `half_norms` = |c_i|^2 / 2.
    """
    steps = len(columns)
    separation = len(start)
    rows = np.ones((separation + 1, LANES))
    dot = np.empty(LANES)
    result = np.zeros(LANES)
    valid = np.ones(LANES, np.bool_)
    for i in range(steps - 1, -1, -1):
        _correlate(y[i:], columns[i], dot)
        out, passed, taken = i % (separation + 1), (i + 1) % (separation + 1), (i + separation) % (separation + 1)
        for k in range(LANES):
            gain = 0.0
            for m in range(1, len(law)):
                gain += law[m] * math.exp(m * (dot[k] - m * half_norms[i]))
            rows[out, k] = law[0] * rows[passed, k] + gain * rows[taken, k]
            valid[k] &= LOWEST < rows[out, k] < HIGHEST
    for h in range(separation):
        for k in range(LANES):
            result[k] += start[h] * rows[h, k]
    for k in range(LANES):
        result[k] = math.log(result[k]) if valid[k] else np.nan
    return result

"""Intervals and tests against published values, other formulas, and a simulation of their coverage."""

import itertools
import math
import random

import pytest

from selfgc_rl.statistics import bootstrap_interval, mcnemar_exact, pass_at_k, wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3 (score without continuity correction).
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_of_all_successes_is_not_a_point():
    low, high = wilson_interval(64, 64)
    assert 0.9 < low < 1.0 and high == pytest.approx(1.0)
    with pytest.raises(ValueError):
        wilson_interval(3, 2)


def test_bootstrap_of_a_mean_approaches_the_normal_interval():
    rng = random.Random(0)
    values = [rng.gauss(0.3, 1.0) for _ in range(200)]
    mean = sum(values) / 200
    half = 1.96 * math.sqrt(sum((v - mean) ** 2 for v in values) / 200 / 200)
    assert bootstrap_interval(values) == pytest.approx((mean - half, mean + half), abs=0.015)


def test_bootstrap_is_repeatable_and_depends_on_its_seed():
    values = [0.0, 1.0, 0.0, 0.5, -1.0, 0.25]
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1, resamples=50) != bootstrap_interval(values, seed=2, resamples=50)


def test_bootstrap_of_equal_values_is_a_point_and_of_one_value_is_refused():
    assert bootstrap_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)
    for too_few in ([], [1.0]):
        with pytest.raises(ValueError):
            bootstrap_interval(too_few)


def test_bootstrap_interval_of_paired_differences_covers_the_truth():
    """64 tasks; base solves 40 %, trained 65 %, correlated through the task's difficulty: the demo's situation."""
    rng = random.Random(7)
    hits = runs = 0
    truth = 0.25
    for _ in range(300):
        differences = []
        for _ in range(64):
            difficulty = rng.random()  # a task is solved when a draw near its difficulty falls below the skill
            base, trained = ((0.5 * difficulty + 0.5 * rng.random()) for _ in range(2))
            # P(0.5 U + 0.5 V < s) of two uniforms is 2 s² below one half, 1 − 2 (1 − s)² above
            skill_base, skill_trained = math.sqrt(0.4 / 2), 1 - math.sqrt(0.35 / 2)
            differences.append(float(trained < skill_trained) - float(base < skill_base))
        low, high = bootstrap_interval(differences, resamples=500, seed=runs)
        hits += low <= truth <= high
        runs += 1
    assert 0.91 <= hits / runs <= 0.985


def test_wilson_covers_the_truth():
    inside = 0.0  # exact coverage at n = 64, averaged over p: no simulation needed
    grid = [i / 50 for i in range(5, 46)]
    for p in grid:
        for k in range(65):
            low, high = wilson_interval(k, 64)
            inside += math.comb(64, k) * p**k * (1 - p) ** (64 - k) * (low <= p <= high)
    assert inside / len(grid) == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (5, 0), (8, 2), (2, 8), (6, 6), (20, 9)])
def test_mcnemar_is_the_two_sided_binomial_test(gained, lost):
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    assert mcnemar_exact(gained, lost) == pytest.approx(min(1.0, 2 * tail))


@pytest.mark.parametrize(
    ("trials", "successes", "k"), [(5, 2, 1), (5, 2, 3), (6, 1, 4), (4, 0, 2), (4, 4, 1), (5, 3, 3)]
)
def test_pass_at_k_is_the_share_of_draws_with_a_success(trials, successes, k):
    draws = list(itertools.combinations([True] * successes + [False] * (trials - successes), k))
    assert pass_at_k(trials, successes, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("wrong", [(3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(wrong):
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(*wrong)

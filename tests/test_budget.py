"""The reward formula of the design: success − λ · aggregate of φ(u_t)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfgc_rl.budget import penalty, phi, reward
from selfgc_rl.config import RewardConfig

BUDGETS = [0.2, 0.6, 0.8, 1.0]  # phi at threshold 0.6: 0, 0, 0.5, 1


@pytest.mark.parametrize(
    ("used", "power", "charge"), [(0.0, 1, 0), (0.6, 1, 0), (0.8, 1, 0.5), (1.0, 1, 1), (0.8, 2, 0.25), (1.0, 3, 1)]
)
def test_phi_is_zero_up_to_the_threshold_and_one_for_a_full_window(used, power, charge):
    assert phi(used, 0.6, power) == pytest.approx(charge)


@pytest.mark.parametrize(("aggregate", "expected"), [("mean", 0.375), ("max", 1.0), ("last", 1.0)])
def test_penalty_aggregates_over_turns(aggregate, expected):
    assert penalty(BUDGETS, RewardConfig(aggregate=aggregate)) == pytest.approx(expected)
    assert penalty(BUDGETS[::-1], RewardConfig(aggregate="last")) == 0.0


def test_reward_is_success_less_lambda_times_penalty():
    config = RewardConfig(coefficient=0.3)
    assert reward(1.0, BUDGETS, config) == pytest.approx(1 - 0.3 * 0.375)
    assert reward(0.0, BUDGETS, config) == pytest.approx(-0.3 * 0.375)
    assert reward(0.0, BUDGETS, RewardConfig(scope="on_success")) == 0.0
    assert reward(0.5, BUDGETS, RewardConfig(scope="on_success")) == pytest.approx(0.5 - 0.3 * 0.375)


def test_an_episode_without_turns_has_no_penalty():
    with pytest.raises(ValueError, match="without turns"):
        penalty([], RewardConfig())


@given(
    st.lists(st.floats(0, 1), min_size=1),
    st.floats(0, 0.99),
    st.floats(0.1, 4),
    st.sampled_from(("mean", "max", "last")),
)
def test_penalty_is_a_share_and_never_falls_when_more_is_used(budgets, threshold, power, aggregate):
    config = RewardConfig(threshold=threshold, power=power, aggregate=aggregate)
    more = [min(1.0, used + 0.1) for used in budgets]
    assert 0.0 <= penalty(budgets, config) <= penalty(more, config) + 1e-12 <= 1.0 + 1e-9

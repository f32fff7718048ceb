"""Group-relative advantages: the baseline sees valid episodes only; groups that cannot teach are counted (R7, R9)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfgc_envs.coding_env import StopReason
from selfgc_rl.advantages import EQUAL_REWARDS, TOO_FEW_VALID, group_advantages
from selfgc_rl.types import Episode
from test_rows import make_episode


def make_group(name: str, rewards: list[float], valid: list[bool] | None = None) -> list[Episode]:
    group = []
    for i, reward in enumerate(rewards):
        episode = make_episode(f"{name}/{i}", [((1,), (2,))])
        episode.reward = reward
        if valid is not None and not valid[i]:
            episode.stop_reason = StopReason.INFRASTRUCTURE
        group.append(episode)
    return group


groups_of_rewards = st.lists(
    st.lists(st.tuples(st.floats(-2, 1, allow_nan=False), st.booleans()), max_size=6), max_size=5
)


@given(groups_of_rewards, st.sampled_from(["none", "std"]))
def test_each_group_is_trained_around_zero_or_skipped_and_counted(case, scale) -> None:
    groups = [make_group(f"g{i}", [r for r, _ in group], [v for _, v in group]) for i, group in enumerate(case)]
    result = group_advantages(groups, scale=scale)
    trained = 0
    for group in groups:
        valid = [e for e in group if e.valid]
        given_ids = [e.episode_id for e in group if e.episode_id in result.advantages]
        assert given_ids in ([], [e.episode_id for e in valid])  # all of the valid ones or none
        if given_ids:
            trained += 1
            assert abs(math.fsum(result.advantages[name] for name in given_ids)) < 1e-6
            order = sorted(valid, key=lambda e: e.reward)
            assert all(
                result.advantages[a.episode_id] <= result.advantages[b.episode_id]
                for a, b in zip(order, order[1:], strict=False)
            )
        else:
            rewards = [e.reward for e in valid]
            assert len(valid) < 2 or max(rewards) - min(rewards) <= 1e-9
    assert trained + result.skipped_groups == len(groups)


def test_the_baseline_is_the_mean_over_valid_episodes_only() -> None:
    group = make_group("g", [1.0, 0.0, -100.0], [True, True, False])
    assert group_advantages([group]).advantages == {"g/0": 0.5, "g/1": -0.5}


def test_there_is_no_division_by_the_standard_deviation_by_default() -> None:
    group = make_group("g", [0.99, 1.0])
    assert max(group_advantages([group]).advantages.values()) == pytest.approx(0.005)
    assert max(group_advantages([group], scale="std").advantages.values()) == pytest.approx(1.0)


def test_skipped_groups_are_counted_with_their_reason() -> None:
    groups = [
        make_group("a", [1.0, 1.0, 1.0]),
        make_group("b", [1.0, 0.0], [True, False]),
        make_group("c", []),
        make_group("d", [1.0, 0.0]),
    ]
    result = group_advantages(groups)
    assert result.skip_reasons == {EQUAL_REWARDS: 1, TOO_FEW_VALID: 2}
    assert result.skipped_groups == 3
    assert set(result.advantages) == {"d/0", "d/1"}


def test_an_episode_without_turns_is_not_valid() -> None:
    group = make_group("g", [1.0, 0.0, 0.5])
    group[2].turns.clear()
    assert group_advantages([group]).advantages == {"g/0": 0.5, "g/1": -0.5}


def test_a_reward_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="episode g/1: its reward is nan"):
        group_advantages([make_group("g", [1.0, math.nan])])

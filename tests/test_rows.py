"""Episodes -> rows: every sampled token is trained exactly once, with its episode's advantage (cases R1, R4, R5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfgc_envs.coding_env import StopReason
from selfgc_rl.rows import rows_from_episodes
from selfgc_rl.types import Episode, Sample, Turn

ids = st.lists(st.integers(0, 999), max_size=8).map(tuple)


def make_turn(index: int, prompt: tuple[int, ...], sampled: tuple[int, ...]) -> Turn:
    logprobs = tuple(-0.5 * (i + 1) for i in range(len(sampled)))
    return Turn(index, Sample(prompt, sampled, logprobs, "text is not used", "stop", "v1"), budget_used=0.5)


def make_episode(name: str, turns: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Episode:
    return Episode(
        episode_id=name,
        group_id=name.split("/")[0],
        task_id="t",
        family="chain",
        pressure=1.2,
        window=256,
        turns=[make_turn(i, prompt, sampled) for i, (prompt, sampled) in enumerate(turns)],
        stop_reason=StopReason.SUBMITTED,
    )


@st.composite
def episodes_and_advantages(draw: st.DrawFn) -> tuple[list[Episode], dict[str, float]]:
    prompts = ids.filter(bool)
    turns = draw(st.lists(st.lists(st.tuples(prompts, ids), max_size=5), max_size=5))
    episodes = [make_episode(f"g{i // 2}/e{i}", t) for i, t in enumerate(turns)]
    chosen = [e.episode_id for e in episodes if draw(st.booleans())]
    return episodes, {name: draw(st.floats(-1, 1)) for name in chosen}


@given(episodes_and_advantages())
def test_every_sampled_token_of_the_chosen_episodes_is_trained_once(case) -> None:
    episodes, advantages = case
    rows = rows_from_episodes(episodes, advantages)
    chosen = [e for e in episodes if e.episode_id in advantages]
    assert sum(len(r.sampled_ids) for r in rows) == sum(e.sampled_tokens for e in chosen)
    expected = [
        (e.episode_id, t.index, t.sample.prompt_ids, t.sample.sampled_ids, t.sample.logprobs)
        for e in chosen
        for t in e.turns
        if t.sample.sampled_ids
    ]
    assert [(r.episode_id, r.turn, r.prompt_ids, r.sampled_ids, r.logprobs) for r in rows] == expected


@given(episodes_and_advantages())
def test_all_rows_of_an_episode_carry_its_one_advantage(case) -> None:
    episodes, advantages = case
    for row in rows_from_episodes(episodes, advantages):
        assert row.advantage == advantages[row.episode_id]
        assert row.group_id == row.episode_id.split("/")[0]


def test_an_empty_completion_gives_no_row_and_no_error() -> None:
    episode = make_episode("g/e", [((1, 2), ()), ((1, 2, 3), (4,))])
    rows = rows_from_episodes([episode], {"g/e": 1.0})
    assert [(r.turn, r.sampled_ids) for r in rows] == [(1, (4,))]


def test_a_length_mismatch_names_episode_and_turn() -> None:
    episode = make_episode("g/e7", [((1,), (2,)), ((1,), (2, 3))])
    bad = Sample((1,), (2, 3), (-0.1,), "", "stop", "v1")
    episode.turns[1] = Turn(1, bad, 0.5)
    with pytest.raises(ValueError, match=r"episode g/e7, turn 1: 2 sampled ids, 1 log-probs"):
        rows_from_episodes([episode], {"g/e7": 1.0})


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="g/e, turn 0: the prompt is empty"):
        rows_from_episodes([make_episode("g/e", [((), (1,))])], {"g/e": 1.0})


def test_an_episode_that_occurs_twice_is_refused() -> None:
    episode = make_episode("g/e", [((1,), (2,))])
    with pytest.raises(ValueError, match="g/e occurs twice"):
        rows_from_episodes([episode, episode], {"g/e": 1.0})


def test_an_advantage_without_an_episode_is_refused() -> None:
    with pytest.raises(ValueError, match="names episode g/lost"):
        rows_from_episodes([make_episode("g/e", [((1,), (2,))])], {"g/e": 1.0, "g/lost": 1.0})

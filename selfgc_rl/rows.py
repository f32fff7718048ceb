"""Episodes -> training rows: one row per turn, token ids exactly as they were sent and sampled.

Invariants (property-tested):

* every sampled token of every episode with an advantage is trained exactly once: the sum of the rows' sampled ids
  equals the sum of the episodes' sampled ids; an episode without an advantage (skipped group) gives no rows;
* all rows of an episode carry the episode's one advantage;
* a turn that sampled nothing gives no row, and nothing is ever re-tokenised, cut or padded here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from selfgc_rl.types import Episode, Row


def rows_from_episodes(episodes: Iterable[Episode], advantages: Mapping[str, float]) -> list[Row]:
    """Rows of all episodes that have an advantage, in episode order, then turn order.

    Args:
        episodes: valid episodes and others; those without an entry in ``advantages`` are left out.
        advantages: episode id -> advantage, from :func:`selfgc_rl.advantages.group_advantages`.

    Raises:
        ValueError: a turn's ids and log-probs differ in number, a row would have no prompt, an episode id occurs
            twice, or an advantage names an unknown episode. The episode and the turn are named.
    """
    rows: list[Row] = []
    seen: set[str] = set()
    for episode in episodes:
        if episode.episode_id in seen:
            raise ValueError(f"episode {episode.episode_id} occurs twice: its tokens would be trained twice")
        seen.add(episode.episode_id)
        if episode.episode_id not in advantages:
            continue
        for turn in episode.turns:
            sample = turn.sample
            where = f"episode {episode.episode_id}, turn {turn.index}"
            if len(sample.logprobs) != len(sample.sampled_ids):
                raise ValueError(f"{where}: {len(sample.sampled_ids)} sampled ids, {len(sample.logprobs)} log-probs")
            if not sample.sampled_ids:
                continue
            if not sample.prompt_ids:
                raise ValueError(f"{where}: the prompt is empty, so the first sampled token has no predecessor")
            rows.append(
                Row(
                    prompt_ids=sample.prompt_ids,
                    sampled_ids=sample.sampled_ids,
                    logprobs=sample.logprobs,
                    advantage=advantages[episode.episode_id],
                    episode_id=episode.episode_id,
                    group_id=episode.group_id,
                    turn=turn.index,
                )
            )
    if unknown := advantages.keys() - seen:
        raise ValueError(f"an advantage names episode {min(unknown)}, which is not among the episodes")
    return rows

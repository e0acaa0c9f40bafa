"""Rollouts made by hand, for tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mrlhf.batch import NO_VERSION, Episode, Prompts, Rollout
from mrlhf.records import SamplingMasks, as_bits, as_words, head_octets


def make_rollout(
    prompts: Prompts,
    sample_index: list[int],
    response_ids: Tensor,
    response_mask: Tensor,
    rollout_logprobs: Tensor,
    stopped: Tensor,
    version: int = 0,
) -> Rollout:
    """A rollout whose response tokens were all drawn by one version of the policy."""
    versions = torch.full(response_mask.shape, NO_VERSION, dtype=torch.int32)
    return Rollout(
        prompts=prompts,
        sample_index=sample_index,
        response_ids=response_ids,
        response_mask=response_mask,
        loss_mask=response_mask,
        rollout_logprobs=rollout_logprobs,
        versions=versions.masked_fill(response_mask, version),
        stopped=stopped,
    )


def with_holes(rollout: Rollout, not_drawn: Tensor) -> Rollout:
    """The same rollout, in which the policy did not draw some of the tokens.

    Args:
        rollout: a rollout.
        not_drawn: bool [batch, response_len], those tokens.
    """
    loss_mask = rollout.loss_mask & ~not_drawn
    return replace(
        rollout,
        loss_mask=loss_mask,
        rollout_logprobs=rollout.rollout_logprobs.masked_fill(~loss_mask, 0.0),
        versions=rollout.versions.masked_fill(~loss_mask, NO_VERSION),
    )


def as_episodes(rollout: Rollout, turn_rewards: list[list[float]]) -> Rollout:
    """The same rollout as episodes, in which each token that was drawn is a turn.

    Args:
        rollout: a rollout.
        turn_rewards: the rewards of each row's first turns.
    """
    episodes = []
    for drawn, rewards in zip(rollout.loss_mask, turn_rewards, strict=True):
        turns = (drawn.nonzero().flatten() + 1).tolist()
        assert len(rewards) <= len(turns), f"{len(rewards)} rewards for {len(turns)} turns"
        begins = [0, *turns[:-1]]
        episodes.append(Episode(turn_begins=begins, turns=turns, turn_rewards=rewards))
    return replace(rollout, episodes=episodes)


def with_contexts(rollout: Rollout, contexts: dict[int, list[tuple[int, int]]]) -> Rollout:
    """The same rollout as episodes, some of which go on in other contexts.

    Args:
        rollout: a rollout.
        contexts: by row, where further contexts begin, and how many tokens are their prompts.
    """
    told = torch.zeros_like(rollout.loss_mask)
    for row, spans in contexts.items():
        for begin, prompt in spans:
            told[row, begin : begin + prompt] = True

    rollout = as_episodes(with_holes(rollout, told), [[] for _ in range(len(rollout))])
    assert rollout.episodes is not None
    episodes = [
        replace(
            episode,
            context_begins=[begin for begin, _ in contexts.get(row, [])],
            context_prompts=[prompt for _, prompt in contexts.get(row, [])],
        )
        for row, episode in enumerate(rollout.episodes)
    ]

    return replace(rollout, episodes=episodes)


def masks_of(
    could: Tensor, drawn: Tensor | None = None, log_q: Tensor | None = None, head: int = 0
) -> SamplingMasks:
    """The masks of rows.

    Args:
        could: bool [rows, places, vocab], the tokens that could be drawn; all everywhere: there are
            no masks.
        drawn: bool [rows, places], the places that have a mask; None: all.
        log_q: float32 [rows, places, vocab], whose `head` likeliest tokens are recorded.
    """
    rows, places, vocab_size = could.shape
    if drawn is None:
        drawn = torch.ones(rows, places, dtype=torch.bool)
    record = as_bits(could.reshape(-1, vocab_size))
    if could.all():
        record = record[:, :0]
    if log_q is not None:
        top, ids = log_q.reshape(-1, vocab_size).topk(head)
        record = torch.cat([record, head_octets(ids, top)], dim=1)
    every = as_words(record.numpy(), head)
    words = [
        own if is_drawn else own[:0] for own, is_drawn in zip(every, drawn.flatten(), strict=True)
    ]
    counts = torch.tensor([len(own) for own in words], dtype=torch.int32).view(rows, places)
    in_rows = counts.sum(dim=1)
    return SamplingMasks(
        torch.from_numpy(np.concatenate(words)), in_rows.cumsum(0) - in_rows, counts, head
    )

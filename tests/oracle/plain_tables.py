"""What transformers says of each token of a rollout, one sequence at a time and unpadded.

It shares no code with mrlhf but the batch types; the formulas are written out again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrlhf.batch import Rollout
from tests.oracle.plain_models import critic_of, load
from tests.padding import pad_responses

TEMPERATURE = 0.7


def all_tables(model: Path, rollout: Rollout, adapted: bool = False) -> dict[str, Tensor]:
    """Everything below of a policy, its reference and its critic, as `save_models` wrote them.

    If `adapted`, policy and critic have their adapters.
    """
    policy = load(model, adapted)
    reference = load(Path(f"{model}-ref"))
    logprobs, entropies = evaluate(policy, rollout)
    return {
        "logprobs": logprobs,
        "entropy": entropies,
        "full_kl": full_kl(policy, reference, rollout),
        "sum_of_squares": sum_of_squares(policy, rollout),
        "ref_logprobs": evaluate(reference, rollout)[0],
        "values": token_values(load(model.parent / critic_of(model.name), adapted), rollout),
    }


@torch.no_grad()
def evaluate(model: Any, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the response tokens, [batch, response_len], 0 after the end."""
    logprobs = []
    entropies = []
    for row in range(len(rollout)):
        log_p = distribution(model, rollout, row)
        logprobs.append(drawn(log_p, rollout, row))
        entropies.append(entropy(log_p))
    return _padded(logprobs), _padded(entropies)


@torch.no_grad()
def sum_of_squares(model: Any, rollout: Rollout) -> Tensor:
    """Sums of the vocabulary's squared probabilities, [batch, response_len], 0 after the end."""
    rows = [distribution(model, rollout, row) for row in range(len(rollout))]
    return _padded([log_p.exp().square().sum(dim=-1) for log_p in rows])


@torch.no_grad()
def token_values(critic: Any, rollout: Rollout) -> Tensor:
    """Values before the response tokens, [batch, response_len], 0 after the end."""
    return _padded([values(critic, rollout, row) for row in range(len(rollout))])


@torch.no_grad()
def full_kl(model: Any, reference: Any, rollout: Rollout) -> Tensor:
    """KL of the two over the vocabulary, [batch, response_len], 0 after the end."""
    kls = []
    for row in range(len(rollout)):
        log_p = distribution(model, rollout, row)
        log_q = distribution(reference, rollout, row)
        kls.append(kl_between(log_p, log_q))
    return _padded(kls)


def distribution(model: Any, rollout: Rollout, row: int) -> Tensor:
    """Log-probs of the whole vocabulary at each token of a response, [response_len, vocab].

    They are 0 at the tokens that are the prompts of contexts. Where sampling was truncated, they
    are over the tokens that could be drawn, and the others have no probability.
    """
    parts: list[Tensor] = []
    for told, ids, first in _contexts(rollout, row):
        logits = model(ids[None]).logits[0, first:-1] / TEMPERATURE
        begin = sum(map(len, parts)) + told
        could = _could_be_drawn(rollout, row, range(begin, begin + len(logits)), logits.shape[1])
        log_p = logits.masked_fill(~could, -1e9).log_softmax(dim=-1)
        parts += [log_p.new_zeros(told, log_p.shape[1]), log_p]
    return torch.cat(parts)


def _could_be_drawn(rollout: Rollout, row: int, places: range, vocab_size: int) -> Tensor:
    """The tokens that the rollout's masks let through at some places, bool [places, vocab]."""
    could = torch.ones(len(places), vocab_size, dtype=torch.bool)
    if rollout.masks is None:
        return could
    counts = rollout.masks.counts[row].tolist()
    for number, place in enumerate(places):
        begin = int(rollout.masks.begins[row]) + sum(counts[:place])
        end = begin + max(0, counts[place] - 2 * rollout.masks.head)
        words = rollout.masks.words[begin:end].tolist()
        if len(words) == math.ceil(vocab_size / 32):
            could[number] = torch.tensor([w >> bit & 1 for w in words for bit in range(32)])[
                :vocab_size
            ]
        elif words:
            could[number] = torch.isin(torch.arange(vocab_size), torch.tensor(words))
    return could


def head_of(rollout: Rollout, row: int, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """The engine's likeliest tokens at each place of a response, and their log-probabilities.

    Both [response_len, head]; -inf where nothing was drawn. `log_p` [response_len, vocab] says how
    long the response is.
    """
    masks = rollout.masks
    assert masks is not None
    ids = torch.zeros(len(log_p), masks.head, dtype=torch.int64)
    log_q = torch.full(ids.shape, -math.inf)
    ends = int(masks.begins[row]) + masks.counts[row].cumsum(0)
    for place in masks.counts[row, : len(log_p)].nonzero()[:, 0].tolist():
        end = int(ends[place])
        ids[place] = masks.words[end - 2 * masks.head : end - masks.head]
        log_q[place] = masks.words[end - masks.head : end].view(torch.float32)
    return ids, log_q


def _contexts(rollout: Rollout, row: int) -> Iterator[tuple[int, Tensor, int]]:
    """For each context its prompt's tokens in the response, its tokens, and its last prompt token.

    The prompt of the first context is no part of the response.
    """
    prompt = rollout.prompts.token_ids[row]
    response = rollout.response_ids[row][rollout.response_mask[row]].tolist()
    spans: list[tuple[int, int]] = [(0, 0)]
    if rollout.episodes is not None:
        episode = rollout.episodes[row]
        spans += zip(episode.context_begins, episode.context_prompts, strict=True)
    ends = [*(begin for begin, _ in spans[1:]), len(response)]
    for (begin, told), end in zip(spans, ends, strict=True):
        before = prompt if begin == 0 else []
        yield told, torch.tensor(before + response[begin:end]), len(before) + told - 1


def drawn(log_p: Tensor, rollout: Rollout, row: int) -> Tensor:
    """Of the response's own tokens, [response_len]."""
    return log_p.gather(1, rollout.response_ids[row, : len(log_p), None].long())[:, 0]


def values(critic: Any, rollout: Rollout, row: int) -> Tensor:
    """What the critic says before each token of a response, [response_len]."""
    parts = []
    for told, ids, first in _contexts(rollout, row):
        found = critic.score(critic.model(ids[None])[0])[0, first:-1, 0]
        parts += [found.new_zeros(told), found]
    return torch.cat(parts)


def entropy(log_p: Tensor) -> Tensor:
    """Of each distribution, [response_len]."""
    return -(log_p.exp() * log_p).sum(-1)


def kl_between(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL of each distribution p to q, [response_len]."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_responses([row.tolist() for row in rows], torch.float32)[0]

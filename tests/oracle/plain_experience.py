"""The batches that plain loops learn from: random tokens, and what is known of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.batch import Experience, Prompts, Rollout
from tests import rollouts
from tests.oracle.plain_models import SIZES, critic_of, load
from tests.oracle.plain_tables import distribution, drawn, evaluate, token_values
from tests.padding import pad_responses

PROMPT_LENGTHS = (1, 3, 3, 3, 2, 6, 2, 2)
RESPONSE_LENGTHS = (4, 1, 9, 3, 7, 2, 5, 10)
# Rows that have the prompt of another row: three of a prompt, and two.
SAMPLES = {2: 1, 3: 1, 7: 6}
# Row and tokens [begin, end) of spans inside a response, at its begin, at its end, and two in one.
HOLES = ((0, 1, 3), (2, 3, 7), (4, 0, 3), (6, 3, 5), (7, 2, 5), (7, 7, 8))

# By row, where contexts after the first begin in the response, and the tokens of their prompts. The
# last one of row 4 has nothing but its prompt.
CONTEXTS = {2: [(4, 2)], 4: [(2, 1), (5, 2)], 6: [(2, 2)], 7: [(3, 1), (6, 2)]}


def make_rollout() -> Rollout:
    """Random tokens with ragged prompts and responses."""
    generator = torch.Generator().manual_seed(35)

    def draw(length: int) -> list[int]:
        return torch.randint(0, SIZES["vocab_size"], (length,), generator=generator).tolist()

    count = len(PROMPT_LENGTHS)
    drawn = [draw(length) for length in PROMPT_LENGTHS]
    prompts = Prompts(
        token_ids=[drawn[SAMPLES.get(row, row)] for row in range(count)],
        uid=list(range(count)),
        text=[""] * count,
        data_source=[""] * count,
        ground_truth=[""] * count,
        extra_info=[{} for _ in range(count)],
    )
    ids, mask = pad_responses([draw(length) for length in RESPONSE_LENGTHS], torch.int32)
    stopped = torch.ones(count, dtype=torch.bool)
    return rollouts.make_rollout(prompts, [0] * count, ids, mask, torch.zeros(mask.shape), stopped)


def taught(rollout: Rollout) -> Rollout:
    """The same responses to the prompts that a teacher reads, longer and shorter ones."""
    ids = [
        [*prompt[1:], row % 5, *prompt[:row]]
        for row, prompt in enumerate(rollout.prompts.token_ids)
    ]
    return replace(rollout, prompts=replace(rollout.prompts, token_ids=ids))


def make_experience(model: Path, contexts: bool = False) -> Experience:
    """Old log-probs and values are so near the model's that some, not all, are clipped.

    With `contexts`, some responses have several of them.
    """
    rollout = make_rollout()
    if contexts:
        rollout = rollouts.with_contexts(rollout, CONTEXTS)
    generator = torch.Generator().manual_seed(6)
    mask = rollout.response_mask

    def noise(size: float) -> Tensor:
        return torch.where(mask, size * torch.randn(mask.shape, generator=generator), 0.0)

    logprobs, _ = evaluate(load(model), rollout)
    values = token_values(load(model.parent / critic_of(model.name)), rollout)
    return Experience(
        rollout=rollout,
        scores=torch.zeros(len(rollout)),
        loss_mask=rollout.loss_mask,
        old_logprobs=logprobs + noise(0.7),
        ref_logprobs=evaluate(load(Path(f"{model}-ref")), rollout)[0],
        token_rewards=torch.zeros(mask.shape),
        values=values + noise(0.5),
        advantages=noise(1.0),
        returns=values + noise(1.0),
        positive=torch.arange(len(rollout)) % 3 == 0,
    )


def broken(experience: Experience) -> Experience:
    """The same with one advantage that is no number, in the last response."""
    advantages = experience.advantages.clone()
    advantages[-1, 0] = float("nan")
    return replace(experience, advantages=advantages)


def with_correction(experience: Experience) -> Experience:
    """The same with weights, some tokens rejected, and one whole response rejected."""
    generator = torch.Generator().manual_seed(7)
    mask = experience.rollout.response_mask
    kept = experience.loss_mask & (torch.rand(mask.shape, generator=generator) < 0.7)
    kept[2] = False
    weights = torch.where(mask, 0.5 + torch.rand(mask.shape, generator=generator), 0.0)
    return replace(experience, loss_mask=kept, weights=weights)


def with_masks(experience: Experience, model: Path) -> Experience:
    """The same, but at each place only some random tokens could be drawn, few or many."""
    generator = torch.Generator().manual_seed(8)
    rollout = experience.rollout
    shape = (*rollout.shape, SIZES["vocab_size"])
    shares = torch.rand(rollout.shape, generator=generator)[:, :, None] ** 3
    could = torch.rand(shape, generator=generator) < shares
    could.scatter_(2, rollout.response_ids[:, :, None].long(), True)
    masked = replace(rollout, masks=rollouts.masks_of(could, rollout.loss_mask))

    policy = load(model)
    of_masks = evaluate(policy, masked)[0] - evaluate(policy, rollout)[0]
    return replace(
        experience,
        rollout=masked,
        old_logprobs=experience.old_logprobs + of_masks,
        ref_logprobs=evaluate(load(Path(f"{model}-ref")), masked)[0],
    )


def with_heads(experience: Experience, model: Path, head: int = 5) -> Experience:
    """The same, drawn by an engine whose distributions are not quite the model's; with its heads.

    Only what the experience's masks let through could be drawn.
    """
    generator = torch.Generator().manual_seed(9)
    rollout = experience.rollout
    log_q = torch.zeros(*rollout.shape, SIZES["vocab_size"])
    old_logprobs = torch.zeros(rollout.shape)
    policy = load(model)
    with torch.no_grad():
        for row in range(len(rollout)):
            log_p = distribution(policy, rollout, row)
            noise = 0.5 * torch.randn(log_p.shape, generator=generator)
            log_q[row, : len(log_p)] = (log_p + noise).log_softmax(dim=-1)
            old_logprobs[row, : len(log_p)] = drawn(log_q[row, : len(log_p)], rollout, row)
    could = log_q > -1e4
    masks = rollouts.masks_of(could, rollout.loss_mask, log_q.where(could, -math.inf), head)
    return replace(experience, rollout=replace(rollout, masks=masks), old_logprobs=old_logprobs)


def with_holes(experience: Experience) -> Experience:
    """The same, but a tool and not the policy has put the tokens at `HOLES` into the responses."""
    not_drawn = torch.zeros_like(experience.loss_mask)
    for row, begin, end in HOLES:
        not_drawn[row, begin:end] = True
    assert experience.rollout.response_mask[not_drawn].all()

    return replace(
        experience,
        rollout=rollouts.with_holes(experience.rollout, not_drawn),
        loss_mask=experience.loss_mask & ~not_drawn,
    )

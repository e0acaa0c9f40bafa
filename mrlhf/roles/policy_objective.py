"""The loss of one mini-batch of the policy, as the pipeline calls it for each micro-batch.

`PolicyObjective` takes the current policy's log-probabilities; `MiniBatchLoss` computes them from
hidden states. Neither knows where advantages and weights come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrlhf.metrics import Tally
from mrlhf.parallel.packs import Pack, gather_rows, lay_in_rows
from mrlhf.parallel.vocab import LossPart
from mrlhf.parallel.vocab_sums import TokenNumbers
from mrlhf.rl.kl import kl_penalty
from mrlhf.rl.losses import aggregation_count
from mrlhf.rl.masking import masked_sum
from mrlhf.roles.policy_loss import PolicyBatch, PolicyLossSettings
from mrlhf.roles.token_logprobs import ReferenceStates, TokenLogprobs
from mrlhf.training.results import PackResult


@dataclass(frozen=True)
class PolicyMiniBatch:
    """One mini-batch as this rank trains on it."""

    sequences: int  # the number of sequences of the mini-batch over all ranks
    tokens: int  # the number of their tokens that correction has kept
    taught_tokens: int  # the number of their tokens on which a teacher teaches
    right_tokens: int  # the number of their drawn tokens in right responses
    # the numbers of each of this rank's packs, where the model is: of the tokens that this rank
    # holds, or of whole sequences where the loss needs these
    packs: list[PolicyBatch]
    teachers: Sequence[int] = ()  # those that have any of these tokens, if they have names

    @staticmethod
    def of(batch: PolicyBatch, packs: Sequence[Pack], by_token: bool) -> PolicyMiniBatch:
        """The mini-batch with these tables.

        The rows of this rank's packs are counted from the mini-batch's first row. `by_token` says
        whether the loss of a token depends on no other token.
        """
        taught = batch.taught
        return PolicyMiniBatch(
            sequences=len(batch.mask),
            tokens=int(batch.mask.sum()),
            taught_tokens=int(taught.sum()),
            right_tokens=0 if batch.right is None else int(batch.right.sum()),
            packs=batch.of_packs(packs, whole_rows=not by_token),
            teachers=() if batch.teachers is None else batch.teachers[taught].unique().tolist(),
        )


class PolicyObjective:
    """Policy loss, entropy bonus, KL to the reference, divergence from a teacher, and likelihood of
    right responses.
    """

    def __init__(self, settings: PolicyLossSettings, mini_batch: PolicyMiniBatch) -> None:
        self._settings = settings
        self._section = settings.section
        mode = self._section.agg_mode
        self._count = aggregation_count(mini_batch.tokens, mini_batch.sequences, mode)
        self._taught = aggregation_count(mini_batch.taught_tokens, mini_batch.sequences, mode)
        self._right_tokens = max(mini_batch.right_tokens, 1)
        self._teachers = mini_batch.teachers

    def __call__(
        self, batch: PolicyBatch, numbers: TokenNumbers, share: float
    ) -> tuple[Tensor, Tally]:
        """The part of some tokens in the loss, and its tally.

        `numbers` are those under the current policy, each of the batch's shape; `share` is the
        share of these tokens in the mini-batch.
        """
        section = self._section
        logprobs = numbers.logprobs
        mask = batch.mask
        tokens = mask.sum()

        policy, per_token = self._settings.loss(batch, logprobs)
        policy_term = self._aggregate(per_token, batch)
        loss = policy_term
        tally = Tally()
        tally.add("actor/pg_loss", policy_term, share)
        tally.add("actor/pg_clipfrac", masked_sum(policy.clipped.float(), mask), tokens)
        tally.add("actor/pg_clipfrac_lower", masked_sum(policy.clipped_lower.float(), mask), tokens)
        tally.add("actor/ppo_kl", masked_sum(policy.approx_kl, mask), tokens)

        if numbers.heads is not None:
            centring = self._settings.centring(batch, numbers.heads)
            # The loss of a token is -A w log p.
            term = self._aggregate(batch.advantages * centring.mean, batch)
            loss = loss + term
            tally.add("actor/sc_correction", term, share)
            for name, mass in (("sampler", centring.engine_mass), ("train", centring.policy_mass)):
                tally.add(f"actor/sc_{name}_head_mass", masked_sum(mass, mask), tokens)

        if numbers.entropy is not None:
            if self._settings.bypass is not None:  # else the pass before the update measures it
                drawn = batch.drawn
                tally.add("actor/entropy", masked_sum(numbers.entropy, drawn), drawn.sum())
            if section.entropy_coeff:
                loss = loss - section.entropy_coeff * self._aggregate(numbers.entropy, batch)

        if section.use_kl_loss:
            kl_loss = self._aggregate(self._kl(batch, numbers), batch)
            loss = loss + section.kl_loss_coef * kl_loss
            tally.add("actor/kl_loss", kl_loss, share)

        distillation = self._settings.distillation
        if distillation is not None:
            assert numbers.full_kl is not None
            taught = batch.taught
            weighted = numbers.full_kl * batch.token_weights
            divergence = masked_sum(weighted, taught) / self._taught
            loss = loss + distillation.coef * divergence
            tally.add("actor/distillation_kl", divergence, share)
            for number in self._teachers:
                assert batch.teachers is not None
                own = taught & (batch.teachers == number)
                name = self._settings.teacher_metrics[number]
                tally.add(name, masked_sum(numbers.full_kl, own), own.sum())

        if batch.right is not None and section.positive_lm_coef:
            # Mean negative log-likelihood of the tokens that the policy drew in right responses,
            # as in VAPO, https://arxiv.org/abs/2504.05118.
            positive_lm_loss = -masked_sum(logprobs, batch.right) / self._right_tokens
            loss = loss + section.positive_lm_coef * positive_lm_loss
            tally.add("actor/positive_lm_loss", positive_lm_loss, share)
        return loss, tally

    def _kl(self, batch: PolicyBatch, numbers: TokenNumbers) -> Tensor:
        if self._section.kl_loss_type == "full":
            assert numbers.full_kl is not None
            return numbers.full_kl
        assert batch.ref_logprobs is not None
        return kl_penalty(numbers.logprobs, batch.ref_logprobs, self._section.kl_loss_type)

    def _aggregate(self, per_token: Tensor, batch: PolicyBatch) -> Tensor:
        return masked_sum(per_token * batch.token_weights, batch.mask) / self._count


class MiniBatchLoss:
    """The policy's loss on a mini-batch, from the hidden states of each of this rank's packs."""

    def __init__(
        self,
        settings: PolicyLossSettings,
        mini_batch: PolicyMiniBatch,
        token_logprobs: TokenLogprobs,
        packs: Sequence[Pack],
        ref_states: Sequence[ReferenceStates] | None,
    ) -> None:
        """Prepare the loss of one mini-batch.

        `ref_states` are those of this rank's packs, or None where the loss holds no KL over the
        whole vocabulary.
        """
        self._settings = settings
        self._mini_batch = mini_batch
        self._objective = PolicyObjective(settings, mini_batch)
        self._token_logprobs = token_logprobs
        self._packs = packs
        self._ref_states = ref_states

    def __call__(self, hidden: Tensor, number: int) -> tuple[Tensor, PackResult]:
        """The share of pack `number` in the loss, and its tally.

        In bypass mode, and without old log-probabilities, the result keeps the log-probabilities
        and entropies, [2, selected].
        """
        settings = self._settings
        pack = self._packs[number]
        keeps = settings.bypass is not None or self._mini_batch.packs[number].old_logprobs is None
        with_entropy = keeps or settings.section.entropy_coeff != 0
        wanted = settings.numbers(with_entropy)
        reference = None if self._ref_states is None else self._ref_states[number]
        ids = engine_heads = None
        if settings.centres and pack.masks is not None:  # None: the policy drew nothing
            ids, engine_heads = pack.masks.heads(hidden.device)
        parts = self._token_logprobs.loss_parts(
            hidden, pack, wanted, settings.by_token, reference, ids
        )

        tally = Tally()
        kept: list[TokenNumbers] = []
        # All ranks that share the sequences count them together.
        share = pack.begun_rows / self._mini_batch.sequences
        if settings.by_token:
            share /= pack.segments.size
        for part in parts:
            batch, numbers = self._tables(number, part)
            if engine_heads is not None:
                batch = replace(batch, engine_heads=engine_heads[part.tokens][None])
            if not settings.needs_mini_batch_pass:
                batch = settings.corrected(batch, numbers.logprobs)
            loss, part_tally = self._objective(batch, numbers, share)
            parts.add(part, loss)
            share = 0.0  # the pack counts once, however many parts it has
            # All ranks that share the sequences have the loss of whole ones; one of them counts it.
            if settings.by_token or pack.segments.rank == 0:
                tally.merge(part_tally)
            kept.append(part.numbers)
        return parts.total(), PackResult(tally, _logprobs_and_entropy(kept) if keeps else None)

    def _tables(self, number: int, part: LossPart) -> tuple[PolicyBatch, TokenNumbers]:
        """The part's tokens in one row, or tables of its sequences where the loss needs these."""
        if not self._settings.by_token:
            return self._whole_rows(number, part.rows, part.numbers)
        batch = self._mini_batch.packs[number].map(lambda flat: flat[part.tokens][None])
        return batch, part.numbers.map(lambda flat: flat[None])

    def _whole_rows(
        self, number: int, rows: slice, numbers: TokenNumbers
    ) -> tuple[PolicyBatch, TokenNumbers]:
        """Tables of some rows of pack `number`, [rows, response_len].

        `numbers` are those of this rank's tokens of the rows.
        """
        pack = self._packs[number]
        counts = pack.row_counts
        first = int(counts[: rows.start].sum())
        counts = counts[rows]
        flat = slice(first, first + int(counts.sum()))

        def lay(whole: Tensor) -> Tensor:
            return lay_in_rows(whole, counts, pack.width)

        wanted = {name: own for name, own in vars(numbers).items() if own is not None}
        cp_group = self._token_logprobs.engine.groups.cp
        whole = gather_rows(torch.stack(list(wanted.values())), pack, cp_group, rows)
        table = replace(numbers, **dict(zip(wanted, map(lay, whole), strict=True)))
        return self._mini_batch.packs[number].map(lambda of_pack: lay(of_pack[flat])), table


def _logprobs_and_entropy(parts: Sequence[TokenNumbers]) -> Tensor:
    """Both of all tokens of a pack, [2, selected]."""
    logprobs = torch.cat([part.logprobs.detach() for part in parts])
    entropies = [part.entropy.detach() for part in parts if part.entropy is not None]
    return torch.stack([logprobs, torch.cat(entropies)])

"""The policy: log-probabilities and entropy of responses, and the PPO update.

It knows the losses of `rl` and how to get log-probabilities out of sharded logits; where advantages come from it does
not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.config.sections import ActorSection
from mrlhf.device import Device
from mrlhf.metrics import Tally
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.microbatch import MiniBatch, Pack
from mrlhf.parallel.vocab import vocab_parallel_kl, vocab_parallel_logprobs
from mrlhf.rl.kl import kl_penalty
from mrlhf.rl.losses import aggregate, aggregation_count, ppo_policy_loss
from mrlhf.rl.masking import masked_sum
from mrlhf.roles.base import TrainedRole, spread

UPDATE_METRICS = ("actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/kl_loss")


@dataclass(frozen=True)
class Evaluation:
    """What a forward pass over a rollout gives; float32 [batch, response_len].

    Attributes:
        logprobs: of the response tokens, at the rollout temperature.
        entropy: of the distribution each token was drawn from, nats.
        full_kl: KL to the reference over the whole vocabulary, or None where its logits were not given.
    """

    logprobs: Tensor
    entropy: Tensor
    full_kl: Tensor | None


class Actor(TrainedRole):
    """The policy that is trained."""

    section: ActorSection

    def __init__(
        self, section: ActorSection, spec: ModelSpec, groups: RoleGroups, device: Device, temperature: float
    ) -> None:
        super().__init__(section, spec, groups, device)
        self.temperature = temperature

    def evaluate(
        self, rollout: Rollout, plan: Sequence[MiniBatch], ref_logits: Sequence[Tensor] | None = None
    ) -> Evaluation:
        """Log-probabilities and entropy under the policy as it is now.

        Args:
            rollout: the global batch.
            plan: its cut; the one that `update` will use, so that both see the same micro-batches.
            ref_logits: the reference's logits of this rank's micro-batches, from `Reference.logits`, on the last stage.
        """
        packs = self.packs(plan, rollout.sequences(), rollout.prompt_lengths, "response")
        channels = 2 if ref_logits is None else 3

        def per_position(logits: Tensor, number: int) -> Tensor:
            logprobs, entropy = self._logprobs(logits, packs[number], with_entropy=True)
            if ref_logits is None:
                return torch.stack([logprobs, entropy])
            return torch.stack([logprobs, entropy, self._full_kl(logits, ref_logits[number])])

        table = self.per_token(packs, rollout.response_mask, per_position, channels)
        return Evaluation(table[0], table[1], None if ref_logits is None else table[2])

    def update(
        self, experience: Experience, plan: Sequence[MiniBatch], ref_logits: Sequence[Tensor] | None = None
    ) -> dict[str, float]:
        """`ppo_epochs` passes over the batch, one optimizer step a mini-batch; returns the `actor/` metrics."""
        rollout = experience.rollout
        sequences, prompts = rollout.sequences(), rollout.prompt_lengths
        total = Tally()
        for _ in range(self.section.ppo_epochs):
            done = 0
            for mini_batch in plan:
                packs = self.packs([mini_batch], sequences, prompts, "response")
                reference = None if ref_logits is None else ref_logits[done : done + len(packs)]
                loss = _PolicyObjective(self, experience, mini_batch, packs, reference)
                total.merge(self.train_mini_batch(packs, loss, UPDATE_METRICS))
                done += len(packs)
        metrics = total.means()
        metrics["actor/grad_norm"] = metrics.pop("grad_norm")
        metrics["actor/approx_kl"] = metrics["actor/ppo_kl"]
        metrics["actor/lr"] = self.end_update()
        if not self.section.use_kl_loss:
            del metrics["actor/kl_loss"]
        return metrics

    def _logprobs(self, logits: Tensor, pack: Pack, with_entropy: bool) -> tuple[Tensor, Tensor]:
        logprobs, entropy = vocab_parallel_logprobs(
            logits,
            pack.targets.to(logits.device),
            self.groups.tp,
            self.temperature,
            self.spec.vocab_size,
            with_entropy=with_entropy,
        )
        return logprobs, logprobs.new_zeros(logprobs.shape) if entropy is None else entropy

    def _full_kl(self, logits: Tensor, ref_logits: Tensor) -> Tensor:
        reference = ref_logits.to(logits.device)
        return vocab_parallel_kl(logits, reference, self.groups.tp, self.temperature, self.spec.vocab_size)


class _PolicyObjective:
    """The loss of one mini-batch, as the pipeline calls it for each of this rank's packs."""

    def __init__(
        self,
        actor: Actor,
        experience: Experience,
        mini_batch: MiniBatch,
        packs: Sequence[Pack],
        ref_logits: Sequence[Tensor] | None,
    ) -> None:
        self._actor, self._experience, self._packs, self._ref_logits = actor, experience, packs, ref_logits
        self._sequences = len(mini_batch.rows)
        tokens = int(experience.rollout.response_mask[mini_batch.rows].sum())
        self._count = aggregation_count(tokens, self._sequences, actor.section.loss_agg_mode)

    def __call__(self, logits: Tensor, number: int) -> tuple[Tensor, Tally]:
        """The pack's part of the loss, and its tally."""
        section, pack = self._actor.section, self._packs[number]
        mask = self._experience.rollout.response_mask[pack.rows].to(logits.device)
        old_logprobs = self._rows(self._experience.old_logprobs, pack, logits)
        advantages = self._rows(self._experience.advantages, pack, logits)
        flat, flat_entropy = self._actor._logprobs(logits, pack, with_entropy=section.entropy_coeff != 0)
        logprobs, entropy = spread(torch.stack([flat, flat_entropy]), mask)
        policy = ppo_policy_loss(
            logprobs, old_logprobs, advantages, section.clip_low, section.clip_high, section.clip_ratio_c
        )
        loss = policy_loss = self._aggregate(policy.per_token, mask)
        if section.entropy_coeff:
            loss = loss - section.entropy_coeff * self._aggregate(entropy, mask)
        tally = Tally()
        share = len(pack.rows) / self._sequences
        tally.add("actor/pg_loss", policy_loss, share)
        tally.add("actor/pg_clipfrac", masked_sum(policy.clipped.float(), mask), mask.sum())
        tally.add("actor/pg_clipfrac_lower", masked_sum(policy.clipped_lower.float(), mask), mask.sum())
        tally.add("actor/ppo_kl", masked_sum(policy.approx_kl, mask), mask.sum())
        if section.use_kl_loss:
            kl_loss = self._aggregate(self._kl(logits, logprobs, number, mask), mask)
            loss = loss + section.kl_loss_coef * kl_loss
            tally.add("actor/kl_loss", kl_loss, share)
        return loss, tally

    def _kl(self, logits: Tensor, logprobs: Tensor, number: int, mask: Tensor) -> Tensor:
        if self._actor.section.kl_loss_type == "full":
            assert self._ref_logits is not None
            return spread(self._actor._full_kl(logits, self._ref_logits[number])[None], mask)[0]
        assert self._experience.ref_logprobs is not None
        reference = self._rows(self._experience.ref_logprobs, self._packs[number], logits)
        return kl_penalty(logprobs, reference, self._actor.section.kl_loss_type)

    def _aggregate(self, per_token: Tensor, mask: Tensor) -> Tensor:
        section = self._actor.section
        assert section.loss_scale_factor is not None
        return aggregate(per_token, mask, section.loss_agg_mode, section.loss_scale_factor) / self._count

    def _rows(self, table: Tensor, pack: Pack, like: Tensor) -> Tensor:
        return table[pack.rows].to(like.device)

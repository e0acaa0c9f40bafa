"""The policy: log-probabilities and entropy of responses, and the update.

It knows how to get log-probabilities out of sharded logits; what loss is made of them is in
`policy_objective`, and where advantages come from it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from mrlhf.rl.correction import Correction
from mrlhf.rl.policy_losses import PolicyLossFunction
from mrlhf.roles.base import TrainedRole, spread
from mrlhf.roles.policy_objective import (
    UPDATE_METRICS,
    PolicyBatch,
    PolicyLossSettings,
    PolicyObjective,
    configured_loss,
)


@dataclass(frozen=True)
class Evaluation:
    """What a forward pass over a rollout gives; float32 [batch, response_len].

    Attributes:
        logprobs: of the response tokens, at the rollout temperature.
        entropy: of the distribution each token was drawn from, nats.
        full_kl: KL to the reference over the whole vocabulary, or None where its logits were not
            given.
    """

    logprobs: Tensor
    entropy: Tensor
    full_kl: Tensor | None


@dataclass(frozen=True)
class PolicyUpdate:
    """What an update of the policy leaves.

    Attributes:
        metrics: the `actor/` metrics.
        logprobs: in bypass mode, float32 [batch, response_len]: each token's log-probability when
            it was first trained on; else None.
        evaluated: bool [batch, response_len], where `logprobs` holds one; an update may end before
            the last row.
    """

    metrics: dict[str, float]
    logprobs: Tensor | None
    evaluated: Tensor


class Actor(TrainedRole):
    """The policy that is trained."""

    section: ActorSection

    def __init__(
        self,
        section: ActorSection,
        spec: ModelSpec,
        groups: RoleGroups,
        device: Device,
        temperature: float,
        loss: PolicyLossFunction | None = None,
        bypass: Correction | None = None,
    ) -> None:
        """`loss` None: the section's; `bypass` corrects every mini-batch against the engine's
        policy.
        """
        super().__init__(section, spec, groups, device)
        self.temperature = temperature
        self._loss = PolicyLossSettings(loss or configured_loss(section), section, bypass)

    def evaluate(
        self,
        rollout: Rollout,
        plan: Sequence[MiniBatch],
        ref_logits: Sequence[Tensor] | None = None,
    ) -> Evaluation:
        """Log-probabilities and entropy under the policy as it is now.

        Args:
            rollout: the global batch.
            plan: its cut; the one that `update` will use, so that both see the same micro-batches.
            ref_logits: the reference's logits of this rank's micro-batches, from
                `Reference.logits`, on the last stage.
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
        self,
        experience: Experience,
        plan: Sequence[MiniBatch],
        ref_logits: Sequence[Tensor] | None = None,
    ) -> PolicyUpdate:
        """`ppo_epochs` passes over the batch, one optimizer step a mini-batch, until the KL says
        stop.

        Raises:
            TrainingError: too many gradients in a row were not usable.
        """
        rollout, limit, bypass = (
            experience.rollout,
            self.section.target_kl_stop,
            self._loss.bypass is not None,
        )
        first_seen = torch.zeros(
            rollout.response_mask.shape if bypass else (0, 0), dtype=torch.float32
        )
        seen_rows = torch.zeros(len(rollout), dtype=torch.bool)

        def too_far(tally: Tally) -> bool:
            return limit is not None and tally.means()["actor/ppo_kl"] > limit

        parts = self._parts(rollout, plan, ref_logits)
        total, steps, kl_at_stop = Tally(), 0, None
        for number, (mini_batch, packs, reference) in enumerate(self.section.ppo_epochs * parts):
            batch = self._batch(experience, mini_batch, packs)
            loss = _ActorObjective(self, batch, mini_batch, packs, reference)
            tally, near = self.train_mini_batch(packs, loss, UPDATE_METRICS, too_far)
            if bypass and number < len(parts):
                loss.store_logprobs(first_seen)
                seen_rows[mini_batch.rows] = True
            if near or steps == 0:  # of an update that ends at once, what it saw is all there is
                total.merge(tally)
            if not near:
                kl_at_stop = tally.means()["actor/ppo_kl"]
                break
            steps += 1
        metrics = self.end_update("actor", total, steps)
        if limit is not None:
            metrics["actor/kl_stopped"] = float(kl_at_stop is not None)
        if kl_at_stop is not None:
            metrics["actor/kl_at_stop"] = kl_at_stop
        if bypass:
            torch.distributed.all_reduce(
                first_seen, group=self.groups.dp_pp
            )  # each entry comes from one rank: exact
        return PolicyUpdate(
            self._present(metrics),
            first_seen if bypass else None,
            rollout.response_mask & seen_rows[:, None],
        )

    def _parts(
        self, rollout: Rollout, plan: Sequence[MiniBatch], ref_logits: Sequence[Tensor] | None
    ) -> list[tuple[MiniBatch, list[Pack], Sequence[Tensor] | None]]:
        """Each mini-batch with this rank's packs of it, and the reference's logits of those packs."""
        sequences, prompts = rollout.sequences(), rollout.prompt_lengths
        parts, begin = [], 0
        for mini_batch in plan:
            packs = self.packs([mini_batch], sequences, prompts, "response")
            reference = None if ref_logits is None else ref_logits[begin : begin + len(packs)]
            parts.append((mini_batch, packs, reference))
            begin += len(packs)
        return parts

    def _batch(
        self, experience: Experience, mini_batch: MiniBatch, packs: Sequence[Pack]
    ) -> PolicyBatch:
        """The mini-batch's numbers, with those that depend on the current policy at all of its
        tokens.
        """
        batch = PolicyBatch.of(experience, mini_batch.rows)
        if not self._loss.looks_ahead:
            return batch
        local = [replace(pack, rows=_within(mini_batch, pack)) for pack in packs]

        def per_position(logits: Tensor, number: int) -> Tensor:
            return self._logprobs(logits, packs[number], with_entropy=False)[0][None]

        return self._loss.looked_ahead(
            batch, self.per_token(local, batch.response_mask, per_position)[0]
        )

    def _present(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics that this configuration measures."""
        section = self.section
        measured = {
            "actor/entropy": self._loss.bypass
            is not None,  # else it is known from the pass before the update
            "actor/kl_loss": section.use_kl_loss,
            "actor/positive_lm_loss": section.positive_lm_coef > 0,
        }
        present = {name: value for name, value in metrics.items() if measured.get(name, True)}
        if (
            "actor/ppo_kl" in present
        ):  # not where every mini-batch was skipped since nothing in it was finite
            present["actor/approx_kl"] = present["actor/ppo_kl"]
        return present

    @property
    def wants_entropy(self) -> bool:
        """Whether the update needs entropies: for the bonus, or since no pass before it told them."""
        return self.section.entropy_coeff != 0 or self._loss.bypass is not None

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
        return vocab_parallel_kl(
            logits, reference, self.groups.tp, self.temperature, self.spec.vocab_size
        )


class _ActorObjective:
    """The loss of one mini-batch, from the logits of each of this rank's packs."""

    def __init__(
        self,
        actor: Actor,
        batch: PolicyBatch,
        mini_batch: MiniBatch,
        packs: Sequence[Pack],
        ref_logits: Sequence[Tensor] | None,
    ) -> None:
        self._actor, self._batch, self._mini_batch = actor, batch, mini_batch
        self._packs, self._ref_logits = packs, ref_logits
        self._objective = PolicyObjective(actor._loss, batch)
        self._seen: dict[int, Tensor] = {}

    def __call__(self, logits: Tensor, number: int) -> tuple[Tensor, Tally]:
        """The pack's part of the loss, and its tally."""
        actor, pack = self._actor, self._packs[number]
        rows = _within(self._mini_batch, pack)
        mask = self._batch.response_mask[rows].to(logits.device)
        flat, flat_entropy = actor._logprobs(logits, pack, with_entropy=actor.wants_entropy)
        if not actor.section.entropy_coeff:
            flat_entropy = flat_entropy.detach()
        logprobs, entropy = spread(torch.stack([flat, flat_entropy]), mask)
        if actor._loss.bypass is not None:
            self._seen[number] = logprobs.detach()
        full_kl = None
        if actor.section.use_kl_loss and actor.section.kl_loss_type == "full":
            assert self._ref_logits is not None
            full_kl = spread(actor._full_kl(logits, self._ref_logits[number])[None], mask)[0]
        return self._objective(rows, logprobs, entropy, full_kl)

    def store_logprobs(self, table: Tensor) -> None:
        """Write the log-probabilities that this rank's packs had into `table` [batch,
        response_len].
        """
        for number, logprobs in self._seen.items():
            table[self._packs[number].rows] = logprobs.cpu()


def _within(mini_batch: MiniBatch, pack: Pack) -> list[int]:
    """Rows of the pack, counted from the first row of its mini-batch, whose rows stand together."""
    return [row - mini_batch.rows[0] for row in pack.rows]

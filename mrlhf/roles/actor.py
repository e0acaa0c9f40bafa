"""The actor: the policy that is trained. It gives log-probabilities and entropy, and is updated.

Its loss is in `policy_loss` and `policy_objective`. The actor does not know where advantages come
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.errors import Interrupted
from mrlhf.metrics import Tally
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.parallel.pack_routing import PassRouting
from mrlhf.parallel.vocab_sums import NumbersToCompute
from mrlhf.records import ExpertRecord
from mrlhf.roles.policy_loss import PolicyLossSettings
from mrlhf.roles.policy_objective import MiniBatchLoss, PolicyMiniBatch
from mrlhf.roles.router_replay import EvaluationRouting, replayed_in_update
from mrlhf.roles.token_logprobs import ReferenceStates, TokenLogprobs, reference_on_device
from mrlhf.roles.update_progress import UpdateProgress
from mrlhf.training.engine import ModelEngine


@dataclass(frozen=True)
class Evaluation:
    """The result of a forward pass over a rollout; float32 [batch, response_len]."""

    logprobs: Tensor  # log-probabilities of the response tokens, at the rollout temperature
    entropy: Tensor  # entropy of the distribution that each token was drawn from, nats
    # KL to the reference over the whole vocabulary, or None where the reference's states were not
    # given
    full_kl: Tensor | None
    # the sum of the squared probabilities of the vocabulary, or None where it was not asked for
    sum_of_squares: Tensor | None = None
    # those that the routers chose, if the update replays them; else None
    experts: ExpertRecord | None = None
    # the share of pairs of response token and mixture for which the routers chose other experts
    # than the engine's; None if the engine has recorded none
    disagreement: float | None = None


@dataclass(frozen=True)
class FirstPass:
    """Each token's numbers when it was first trained on; [batch, response_len]."""

    logprobs: Tensor  # float32
    entropy: Tensor  # float32
    # bool, the tokens drawn by the policy that have numbers; an update may end before the last row
    evaluated: Tensor
    before_step: Tensor  # bool, those of them that the update's first optimizer step came after


@dataclass(frozen=True)
class PolicyUpdate:
    """The results of one update of the policy."""

    metrics: dict[str, float]  # the `actor/` metrics
    first_pass: FirstPass | None  # in bypass mode, and without old log-probabilities; else None


class Actor:
    """Asks a language model for log-probabilities, and trains it."""

    def __init__(
        self, engine: ModelEngine, settings: PolicyLossSettings, temperature: float
    ) -> None:
        """Take the model; `temperature` is that of the log-probabilities' distribution."""
        self.engine = engine
        self._settings = settings
        self._section = settings.section
        self._token_logprobs = TokenLogprobs(engine, temperature)
        engine.further_metrics = settings.teacher_metrics

    def evaluate(
        self,
        rollout: Rollout,
        cut: BatchCut,
        ref_states: Sequence[ReferenceStates] | None = None,
        with_squares: bool = False,
    ) -> Evaluation:
        """Log-probabilities and entropy under the policy's current weights.

        Args:
            rollout: the global batch.
            cut: its cut for this model; `update` must use the same one, so that both see the same
                micro-batches.
            ref_states: from `Reference.states`, one for each of this rank's packs.
            with_squares: whether to sum the squared probabilities of the vocabulary.
        """
        packs = cut.packs
        with_kl = ref_states is not None
        wanted = NumbersToCompute(entropy=True, squares=with_squares, kl=with_kl)

        def evaluate(hidden: Tensor, number: int) -> Tensor:
            reference = None if ref_states is None else ref_states[number]
            numbers = self._token_logprobs.evaluate(hidden, packs[number], wanted, reference)
            return torch.stack([number for number in vars(numbers).values() if number is not None])

        routing = self._evaluation_routing(rollout)
        of_pass = None if routing is None else routing.of_pass
        channels = 2 + with_kl + with_squares
        with reference_on_device(ref_states):
            table = self.engine.per_token(packs, rollout.shape, evaluate, channels, of_pass)
        return Evaluation(
            logprobs=table[0],
            entropy=table[1],
            full_kl=table[2] if with_kl else None,
            sum_of_squares=table[-1] if with_squares else None,
            experts=None if routing is None else routing.kept(),
            disagreement=None if routing is None else routing.disagreement(),
        )

    def update(
        self,
        experience: Experience,
        cut: BatchCut,
        ref_states: Sequence[ReferenceStates] | None = None,
        progress: UpdateProgress | None = None,
    ) -> PolicyUpdate:
        """`ppo_epochs` passes over the batch with one optimizer step for each mini-batch.

        The update ends before the step of a mini-batch whose KL is above `target_kl_stop`.
        Mini-batches that `progress` counts as done are left out. `ref_states` are needed where the
        loss holds a KL over the vocabulary. Without old log-probabilities those of each pass take
        their place, so that every ratio is 1: right for a single mini-batch and epoch.

        Raises:
            TrainingError: too many gradients in a row were not usable.
            Interrupted: the run stops here; `progress` says where.
        """
        progress = progress or UpdateProgress()
        kept: list[tuple[Tensor, Tensor]] = []
        shape = experience.rollout.shape
        keeps = self._settings.bypass is not None or experience.old_logprobs is None
        try:
            with self.engine.training(), reference_on_device(ref_states):
                stopping = self._train(experience, cut, ref_states, progress, kept)
        except Interrupted:
            progress.complete(self.engine)
            if keeps:
                progress.first_logprobs = self._gather(kept, shape, progress.first_logprobs)[0]
            raise

        progress.complete(self.engine)
        metrics = self._end_update(progress, stopping)
        if not keeps:
            return PolicyUpdate(metrics, None)

        reached = progress.mini_batches + (stopping is not None)
        drawn = experience.rollout.loss_mask
        evaluated = torch.zeros_like(drawn)
        before_step = torch.zeros_like(drawn)
        for number, mini_batch in enumerate(cut.mini_batches[:reached]):
            rows = mini_batch.rows
            evaluated[rows] = drawn[rows]
            if number == 0:
                before_step[rows] = drawn[rows]
        logprobs, entropy = self._gather(kept, shape, progress.first_logprobs)
        return PolicyUpdate(metrics, FirstPass(logprobs, entropy, evaluated, before_step))

    def _train(
        self,
        experience: Experience,
        cut: BatchCut,
        ref_states: Sequence[ReferenceStates] | None,
        progress: UpdateProgress,
        kept: list[tuple[Tensor, Tensor]],
    ) -> Tally | None:
        """Train on the mini-batches that are left; returns the metrics of one that ends the update.

        `kept` receives the places of this rank's tokens, and what the loss keeps of them when they
        are first trained on.
        """
        limit = self._section.target_kl_stop
        stop = None if limit is None else partial(_kl_is_above, limit)
        routing = self._pass_routing(experience)
        in_epoch = len(cut.mini_batches)
        steps = self._section.ppo_epochs * in_epoch
        losses: dict[int, MiniBatchLoss] = {}

        for number in range(progress.mini_batches, steps):
            self.engine.phases.advance(number, steps, "mini-batches")
            place = number % in_epoch
            mini_batch = cut.mini_batches[place]
            loss = losses.get(place) or self._loss(experience, cut, place, ref_states)
            if not self._settings.needs_mini_batch_pass:  # it is the same in every epoch
                losses[place] = loss
            result = self.engine.train_mini_batch(mini_batch.packs, loss, "actor", stop, routing)
            if number < in_epoch:  # the first epoch
                for pack, numbers in zip(mini_batch.packs, result.kept, strict=False):
                    if numbers is not None:
                        kept.append((pack.places, numbers.cpu()))

            if result.step is None:
                return self.engine.metrics_of([result])
            progress.add(result)
        return None

    def _end_update(self, progress: UpdateProgress, stopping: Tally | None) -> dict[str, float]:
        """The metrics; `stopping` are those of the mini-batch that ended the update."""
        total = progress.total
        if stopping is not None and progress.mini_batches == 0:
            total = stopping  # no step was taken
        metrics = self.engine.end_update("actor", total)
        self.engine.wait_for_weights()  # the inference engine takes them without a pass

        if "actor/ppo_kl" in metrics:  # missing if every mini-batch was skipped as not finite
            metrics["actor/approx_kl"] = metrics["actor/ppo_kl"]
        if self._section.target_kl_stop is not None:
            metrics["actor/kl_stopped"] = float(stopping is not None)
        if stopping is not None:
            metrics["actor/kl_at_stop"] = stopping.values()["actor/ppo_kl"]
        return metrics

    def _gather(
        self, kept: list[tuple[Tensor, Tensor]], shape: tuple[int, int], earlier: Tensor | None
    ) -> Tensor:
        """The numbers that all ranks have kept, [2, batch, response_len]; every rank calls it once.

        `earlier` are the log-probabilities of what was trained on before the update was
        interrupted.
        """
        groups = self.engine.groups
        table = groups.machine.table((2, *shape), torch.float32)
        if groups.coordinates.tp == 0:
            for places, numbers in kept:
                table.entries.view(2, -1)[:, places] = numbers
        if earlier is not None and torch.distributed.get_rank() == 0:
            held = earlier != 0
            table.entries[0][held] = earlier[held]
        return table.complete()

    def _loss(
        self,
        experience: Experience,
        cut: BatchCut,
        place: int,
        ref_states: Sequence[ReferenceStates] | None,
    ) -> MiniBatchLoss:
        """The loss of mini-batch `place`, after a pass over it where the loss needs one.

        It keeps the numbers of this rank's packs, not the mini-batch's tables; before the last
        stage, where no loss is taken, not even those.
        """
        settings = self._settings
        mini_batch = cut.mini_batches[place]
        packs = mini_batch.local_packs
        batch = settings.batch(experience, mini_batch.rows)
        if settings.needs_mini_batch_pass:
            shape = (len(mini_batch.rows), experience.rollout.shape[1])
            routing = self._pass_routing(experience, mini_batch.rows)
            logprobs = self._token_logprobs.of_batch(packs, shape, routing)
            batch = settings.prepared(batch, logprobs)

        if not self.engine.groups.is_last_stage:
            packs = []
        numbers = PolicyMiniBatch.of(batch, packs, settings.by_token)
        begin = sum(len(earlier.packs) for earlier in cut.mini_batches[:place])
        states = None if ref_states is None else ref_states[begin : begin + len(mini_batch.packs)]
        return MiniBatchLoss(settings, numbers, self._token_logprobs, mini_batch.packs, states)

    def _evaluation_routing(self, rollout: Rollout) -> EvaluationRouting | None:
        """The routing of a pass before the update; None: the routers choose by themselves."""
        replay = self._section.router_replay
        if rollout.experts is None and replay == "none":
            return None
        return EvaluationRouting(self.engine, rollout, replay)

    def _pass_routing(
        self, experience: Experience, rows: Sequence[int] | None = None
    ) -> PassRouting | None:
        """The routing of a pass of the update; with `rows`, packs count their rows among these."""
        replayed = replayed_in_update(experience, self._section.router_replay)
        if replayed is None:
            return None
        if rows is not None:
            replayed = replayed.of_rows(rows)
        return PassRouting(self.engine.device, replayed)


def _kl_is_above(limit: float, metrics: Tally) -> bool:
    """Whether the policy has moved too far for the update to go on."""
    return metrics.values()["actor/ppo_kl"] > limit

"""The reference, the frozen policy that the KL is measured from; and the teacher, another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.parallel.token_exchange import bring_tokens
from mrlhf.roles.token_logprobs import ReferenceStates, TokenLogprobs
from mrlhf.training.engine import ModelEngine
from mrlhf.training.output_shard import OutputShard


class Reference:
    """Asks a frozen language model for log-probabilities or hidden states of responses."""

    def __init__(
        self,
        engine: ModelEngine,
        temperature: float,
        as_reference: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Take the model; a policy with adapters is its own reference within `as_reference`."""
        self.engine = engine
        self._as_reference = as_reference
        self._token_logprobs = TokenLogprobs(engine, temperature)

    def logprobs(self, rollout: Rollout, cut: BatchCut) -> Tensor:
        """Log-probabilities of the response tokens, float32 [batch, response_len] on every host."""
        with self._as_reference():
            return self._token_logprobs.of_batch(cut.packs, rollout.shape)

    def states(self, cut: BatchCut) -> list[ReferenceStates]:
        """The hidden states for a KL over the whole vocabulary, one for each of this rank's packs.

        `cut` and layout must be the actor's. The states are on the host, on the last stage alone.
        """

        def keep(hidden: Tensor, number: int) -> ReferenceStates:
            return ReferenceStates(self.engine.residency, self._token_logprobs.layer, hidden.cpu())

        with self._as_reference():
            return self.engine.forward(cut.packs, keep)


class Teacher(Reference):
    """A reference in a layout of its own, whose distributions another model is compared with."""

    def __init__(
        self,
        engine: ModelEngine,
        temperature: float,
        student: ModelEngine,
        as_teacher: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Take the model, and give the ranks of `student` its output layer.

        The model of the student is its own teacher within `as_teacher`.
        """
        super().__init__(engine, temperature, as_teacher)
        self._student = student
        self._shard = None if engine is student else OutputShard(engine, student, temperature)

    def states_for(self, cut: BatchCut, asked: BatchCut) -> list[ReferenceStates]:
        """The hidden states for each of this rank's packs of `asked`, which is the student's cut.

        `cut` is the teacher's, of the same responses, whose prompts may be others. The states are
        on the host, on the student's last stage alone.
        """
        groups = self.engine.groups
        held = cut.packs if groups.is_last_stage else []
        wanted = asked.packs if self._student.groups.is_last_stage else []
        none = torch.empty(0, dtype=torch.int64)
        own, needed = (
            torch.cat([none, *(pack.places for pack in packs)]) for packs in (held, wanted)
        )

        none = torch.empty(0, self.engine.spec.hidden_size, dtype=self.engine.dtype)
        with self._as_reference():
            evaluated = self.engine.forward(cut.packs, lambda hidden, number: hidden.cpu())
        states = torch.cat([none, *filter(lambda hidden: hidden is not None, evaluated)])
        del evaluated  # it takes as much memory again
        brought = bring_tokens(states, own, needed, groups.world, self.engine.device)
        if not wanted:
            return []
        each = brought.split([len(pack.target_ids) for pack in wanted])
        if self._shard is None:
            residency, layer = self.engine.residency, self._token_logprobs.layer
        else:
            residency, layer = self._shard.residency, self._shard.layer
        return [ReferenceStates(residency, layer, hidden) for hidden in each]

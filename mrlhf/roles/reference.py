"""The reference: the frozen policy that the KL is measured from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.roles.token_logprobs import ReferenceStates, TokenLogprobs
from mrlhf.training.engine import ModelEngine


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

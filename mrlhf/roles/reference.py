"""The reference: the frozen policy that the KL is measured from."""

from __future__ import annotations

from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.roles.token_logprobs import ReferenceStates, TokenLogprobs
from mrlhf.training.engine import ModelEngine


class Reference:
    """Asks a frozen language model for log-probabilities or hidden states of responses."""

    def __init__(self, engine: ModelEngine, temperature: float) -> None:
        self.engine = engine
        self._token_logprobs = TokenLogprobs(engine, temperature)

    def logprobs(self, rollout: Rollout, cut: BatchCut) -> Tensor:
        """Log-probabilities of the response tokens, float32 [batch, response_len] on every host.

        Args:
            rollout: the global batch.
            cut: its cut for this model.
        """
        return self._token_logprobs.of_batch(cut.packs, rollout.shape)

    def states(self, cut: BatchCut) -> list[ReferenceStates]:
        """What the KL over the whole vocabulary needs.

        It takes host memory: response tokens x hidden x bytes of the dtype.

        Args:
            cut: the actor's cut of the batch; the layout must be the actor's too.

        Returns:
            One for each of this rank's packs; nothing before the last stage.
        """

        def keep(hidden: Tensor, number: int) -> ReferenceStates:
            return ReferenceStates(self._token_logprobs.layer, hidden.cpu())

        return self.engine.forward(cut.packs, keep)

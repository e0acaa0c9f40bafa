"""Log-probabilities, entropy and KL of a pack's tokens, from the hidden states of one model.

It does not know losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from mrlhf.parallel.pack_routing import PassRouting
from mrlhf.parallel.packs import Pack
from mrlhf.parallel.vocab import LossParts, OutputLayer, ReferenceTokens, Tokens, token_numbers
from mrlhf.parallel.vocab_sums import NumbersToCompute, TokenNumbers
from mrlhf.training.engine import ModelEngine
from mrlhf.training.residency import Residency


@dataclass(frozen=True)
class ReferenceStates:
    """The references' side of a KL over the whole vocabulary, for one pack."""

    residencies: Sequence[Residency]  # have the output layers on the device
    tokens: Sequence[ReferenceTokens]  # all that are selected, in order; states on any device


@contextmanager
def reference_on_device(states: Sequence[ReferenceStates | None] | None) -> Iterator[None]:
    """Have the reference there as long as its states are used, if there are any."""
    with ExitStack() as stack:
        for state in states or ():
            for residency in () if state is None else state.residencies:
                stack.enter_context(residency.needing("params"))
        yield


@dataclass(frozen=True)
class TokenLogprobs:
    """Turns the hidden states of one language model into numbers for each selected token."""

    engine: ModelEngine  # holds the model
    temperature: float  # divides the logits

    @property
    def layer(self) -> OutputLayer:
        """The output layer of the model; on the last stage only."""
        spec = self.engine.spec
        scale = 1.0 / (self.temperature * spec.logits_divisor)
        more = (self.engine.groups.tp, spec.vocab_size, scale, spec.logits_cap)
        return OutputLayer(self.engine.output_weight, *more)

    def of_batch(
        self, packs: Sequence[Pack], shape: tuple[int, int], routing: PassRouting | None = None
    ) -> Tensor:
        """Run the model over `packs`, this rank's share of a batch with tables of this shape.

        Returns each target token's log-probability, float32 on every rank; 0 where none is wanted.
        """

        def evaluate(hidden: Tensor, number: int) -> Tensor:
            return self.evaluate(hidden, packs[number], NumbersToCompute()).logprobs[None]

        return self.engine.per_token(packs, shape, evaluate, routing=routing)[0]

    def evaluate(
        self,
        hidden: Tensor,
        pack: Pack,
        wanted: NumbersToCompute,
        reference: ReferenceStates | None = None,
    ) -> TokenNumbers:
        """The numbers of each selected token, float32, from its state [selected, hidden]."""
        return token_numbers(self.layer, self._tokens(hidden, pack, reference), wanted)

    def loss_parts(
        self,
        hidden: Tensor,
        pack: Pack,
        wanted: NumbersToCompute,
        by_token: bool,
        reference: ReferenceStates | None = None,
        heads: Tensor | None = None,
    ) -> LossParts:
        """The parts of a loss of the numbers of the selected tokens; see `LossParts`.

        `heads` are the ids of more tokens at each, int64 [selected, head], or None.
        """
        tokens = replace(self._tokens(hidden, pack, reference), heads=heads)
        return LossParts(self.layer, tokens, wanted, by_token)

    def _tokens(self, hidden: Tensor, pack: Pack, reference: ReferenceStates | None) -> Tokens:
        counts = pack.rank_counts
        tokens = Tokens(
            hidden,
            pack.targets,
            lengths=counts[pack.segments.rank].tolist(),
            most_lengths=counts.amax(dim=0).tolist(),
            masks=pack.masks,
        )
        if reference is None:
            return tokens
        there = [replace(each, hidden=each.hidden.to(hidden.device)) for each in reference.tokens]
        return replace(tokens, references=there)

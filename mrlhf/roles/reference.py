"""The reference, the frozen policy that the KL is measured from; and teachers, other ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor

from mrlhf.batch import Rollout, Sequences
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.parallel.packs import Pack
from mrlhf.parallel.token_exchange import bring_tokens
from mrlhf.parallel.vocab import OutputLayer, ReferenceTokens
from mrlhf.roles.token_logprobs import ReferenceStates, TokenLogprobs
from mrlhf.training.engine import ModelEngine
from mrlhf.training.output_shard import OutputShard
from mrlhf.training.residency import Residency


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
            tokens = ReferenceTokens(self._token_logprobs.layer, hidden.cpu())
            return ReferenceStates([self.engine.residency], [tokens])

        with self._as_reference():
            return self.engine.forward(cut.packs, keep)


class Teacher(Reference):
    """A reference in a layout of its own, whose distributions another model is compared with."""

    def __init__(
        self,
        engine: ModelEngine,
        temperature: float,
        student: ModelEngine | None,
        as_teacher: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Take the model, and give the ranks of `student`, if that compares, its output layer.

        The model of the student is its own teacher within `as_teacher`. Like one in its layout,
        it needs no `student`.
        """
        super().__init__(engine, temperature, as_teacher)
        self._shard: OutputShard | None = None
        if student is not None:
            self._shard = OutputShard(engine, student, temperature)

    @property
    def output(self) -> tuple[Residency, OutputLayer]:
        """The output layer on the ranks of the student's last stage, and what brings it there."""
        if self._shard is None:
            return self.engine.residency, self._token_logprobs.layer
        return self._shard.residency, self._shard.layer

    def states_at(self, cut: BatchCut, wanted: Tensor) -> Tensor:
        """The hidden states at the places `wanted`, [wanted, hidden], on the host.

        `cut` is the teacher's, of the same responses, whose prompts may be others.
        """
        groups = self.engine.groups
        held = cut.packs if groups.is_last_stage else []
        own = torch.cat([torch.empty(0, dtype=torch.int64), *(pack.places for pack in held)])

        none = torch.empty(0, self.engine.spec.hidden_size, dtype=self.engine.dtype)
        with self._as_reference():
            evaluated = self.engine.forward(cut.packs, lambda hidden, number: hidden.cpu())
        states = torch.cat([none, *filter(lambda hidden: hidden is not None, evaluated)])
        del evaluated  # it takes as much memory again
        return bring_tokens(states, own, wanted, groups.world, self.engine.device)


class Teachers:
    """One teacher, or several, of which each reads the rows of some data sources alone."""

    def __init__(self, by_name: Mapping[str, Teacher], name_of: Mapping[str, str]) -> None:
        """Take them; `name_of` is the name of each data source's, and empty if there is one."""
        self._by_name = by_name
        self._name_of = name_of

    def shares(self, sources: Sequence[str]) -> dict[str, Tensor]:
        """The rows of each teacher that has any, bool [batch]; `sources` are those of all rows."""
        if not self._name_of:
            return {name: torch.ones(len(sources), dtype=torch.bool) for name in self._by_name}
        names = [self._name_of[source] for source in sources]
        shares = {name: torch.tensor([own == name for own in names]) for name in self._by_name}
        return {name: rows for name, rows in shares.items() if rows.any()}

    def logprobs(self, rollout: Rollout, sequences: Sequences) -> Tensor:
        """Log-probabilities under the teachers, float32 [batch, response_len] on every host.

        `sequences` are the rollout's, whose prompts may be others.
        """
        tables = []
        for name, rows in self.shares(rollout.prompts.data_source).items():
            teacher = self._by_name[name]
            cut = teacher.engine.cut(sequences.select(rows[sequences.rows]), "response")
            tables.append(teacher.logprobs(rollout, cut))
        machine = teacher.engine.groups.machine
        return machine.compute_on_leader(lambda: reduce(torch.add, tables), shared=tables)

    def states_for(
        self, sources: Sequence[str], sequences: Sequences, asked: Sequence[Pack]
    ) -> list[ReferenceStates]:
        """The hidden states for each of the packs `asked`, the student's on its last stage.

        `sequences` have the same responses, and their prompts may be others. The teachers read them
        one after the other. The states are on the host.
        """
        shares = self.shares(sources)
        number_of = torch.stack([*shares.values()]).int().argmax(dim=0)
        places = torch.cat([torch.empty(0, dtype=torch.int64), *(pack.places for pack in asked)])
        numbers = number_of[places // sequences.width]
        # In each pack, how many tokens of a teacher follow each other.
        runs = []
        for of_pack in numbers.split([len(pack.target_ids) for pack in asked]):
            of_runs = torch.unique_consecutive(of_pack, return_counts=True)
            runs.append(list(zip(*(column.tolist() for column in of_runs), strict=True)))

        states = []
        for number, (name, rows) in enumerate(shares.items()):
            teacher = self._by_name[name]
            cut = teacher.engine.cut(sequences.select(rows[sequences.rows]), "response")
            brought = teacher.states_at(cut, places[numbers == number])
            counts = [count for of_pack in runs for own, count in of_pack if own == number]
            states.append(iter(brought.split(counts)))

        outputs = [self._by_name[name].output for name in shares] if asked else []
        found = []
        for of_pack in runs:
            tokens = [ReferenceTokens(outputs[own][1], next(states[own])) for own, _ in of_pack]
            found.append(ReferenceStates([residency for residency, _ in outputs], tokens))
        return found

"""The batches of one PPO step, one type for each stage: Prompts -> Rollout -> Experience.

All tensors are on the host, padded to [batch, response_len]; the packed micro-batches made of them
move to a device. Every rank sees the same batch, so an index means the same sample everywhere. The
ranks of a machine share its tensors (see `parallel/machine.py`), so nobody writes to them. This
file does not know models or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrlhf.records import ExpertRecord, SamplingMasks

NO_VERSION = -1  # of a token that no policy drew
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Sequences:
    """Token sequences in one flat tensor; each is a prompt and a response.

    A row of a batch is one sequence, or several one after the other.
    """

    token_ids: Tensor  # int32 [tokens]
    begins: Tensor  # int64 [sequences], where each sequence begins
    lengths: Tensor  # int64 [sequences], tokens of each sequence, >= 1
    prompt_lengths: Tensor  # int64 [sequences], tokens of each sequence's prompt, >= 1
    width: int  # columns of a table that holds a number for each response token
    rows: Tensor  # int64 [sequences], the row of each sequence, ascending
    columns: Tensor  # int64 [sequences], the column of the first number of each sequence
    # Of the places of such a table, by row; None: any token could be drawn everywhere.
    masks: SamplingMasks | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Tensor:
        """The token ids of one sequence."""
        begin = int(self.begins[row])
        return self.token_ids[begin : begin + int(self.lengths[row])]

    @staticmethod
    def of(rows: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> Sequences:
        """Build the sequences with these token ids."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        prompts = torch.tensor(prompt_lengths, dtype=torch.int64)
        return Sequences(
            token_ids=flat_ids(rows),
            begins=lengths.cumsum(0) - lengths,
            lengths=lengths,
            prompt_lengths=prompts,
            width=int((lengths - prompts).max()),
            rows=torch.arange(len(rows)),
            columns=torch.zeros_like(lengths),
        )

    def last_of_rows(self) -> Sequences:
        """The last sequence of each row."""
        is_last = torch.ones_like(self.rows, dtype=torch.bool)
        is_last[:-1] = self.rows[1:] != self.rows[:-1]
        return self.select(is_last)

    def select(self, chosen: Tensor) -> Sequences:
        """The sequences that `chosen`, bool [sequences], chooses; they keep their rows."""
        return replace(
            self,
            begins=self.begins[chosen],
            lengths=self.lengths[chosen],
            prompt_lengths=self.prompt_lengths[chosen],
            rows=self.rows[chosen],
            columns=self.columns[chosen],
        )


def flat_ids(rows: Sequence[Sequence[int]]) -> Tensor:
    """All token ids, one row after the other; int32 [tokens]."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype=np.int32))


@dataclass(frozen=True)
class Prompts:
    """Tokenised prompts; every list has one entry for each prompt."""

    token_ids: list[list[int]]  # the prompt's tokens with the chat template applied, at least one
    # Stable number of the prompt in its data set; sampling depends on it and not on the order of
    # the batch.
    uid: list[int]
    text: list[str]
    # Name of the data set; it decides which rules score the prompt and which validation metrics it
    # counts in.
    data_source: list[str]
    # The reference answer, as text if a rule compares with it; None if there is none.
    ground_truth: list[Any]
    extra_info: list[dict[str, Any]]  # the rest of the prompt's row, for users' reward functions

    def __post_init__(self) -> None:
        sizes = {len(column) for column in self._columns()}
        assert len(sizes) == 1, f"prompt columns of different lengths: {sorted(sizes)}"

    def __len__(self) -> int:
        return len(self.token_ids)

    def _columns(self) -> tuple[list[Any], ...]:
        return (
            self.token_ids,
            self.uid,
            self.text,
            self.data_source,
            self.ground_truth,
            self.extra_info,
        )

    def select(self, indices: Sequence[int]) -> Prompts:
        """The prompts at `indices`, in that order."""
        return Prompts(*([column[i] for i in indices] for column in self._columns()))

    def row(self, index: int) -> dict[str, Any]:
        """The row of prompt `index`, as an environment gets it."""
        return {
            **self.extra_info[index],
            "answer": self.ground_truth[index],
            "data_source": self.data_source[index],
            "uid": self.uid[index],
        }

    def begun_as(self, episodes: Sequence[Episode]) -> Prompts:
        """The same prompts, where an environment has added to one as its episode has it."""
        ids = [episode.prompt_ids for episode in episodes]
        return replace(
            self,
            token_ids=[b if a is None else a for a, b in zip(ids, self.token_ids, strict=True)],
            text=[
                text if episode.prompt_ids is None else episode.prompt_text
                for episode, text in zip(episodes, self.text, strict=True)
            ],
        )

    def repeat(self, n: int) -> Prompts:
        """Each prompt `n` times, copies side by side: p0 p0 p1 p1 for n = 2."""
        return self.select([i for i in range(len(self)) for _ in range(n)])

    @staticmethod
    def join(parts: Sequence[Prompts]) -> Prompts:
        """The prompts of all parts, one part after the other."""
        columns = zip(*[part._columns() for part in parts], strict=True)
        return Prompts(*[list(chain.from_iterable(column)) for column in columns])


@dataclass
class Episode:
    """What happens in a response of several turns beside its tokens, from the first of them on.

    A turn is what the policy says at once. Between two turns stand the answers of tools and of the
    environment. What the policy reads before a turn is its context. It may begin anew: then the
    response goes on with the prompt of another context, and nothing before that is read.
    """

    # The prompt with which it began, if its environment added to that of the data.
    prompt_ids: list[int] | None = None
    prompt_text: str = ""
    # Where each turn begins, the present one too: the number of response tokens before it.
    turn_begins: list[int] = field(default_factory=lambda: [0])
    # Where each turn ends that has ended: the number of response tokens before its end.
    turns: list[int] = field(default_factory=list)
    # How often each tool was called; "error": calls that cannot be read.
    tools: dict[str, int] = field(default_factory=dict)
    errors: int = 0  # calls that could not be read, and tools that failed
    failure: str = ""  # why it could not go on; if it could not, nothing of it trains
    score: float | None = None  # of its environment, if that gives one
    further: dict[str, float] = field(default_factory=dict)  # its other numbers
    # Of each turn, up to the last one that has any; empty if the environment gives none.
    turn_rewards: list[float] = field(default_factory=list)
    waited_s: float = 0.0  # seconds for which it waited for tools and environment
    # Of each context after the first: the number of response tokens before it, and how many of its
    # own are its prompt.
    context_begins: list[int] = field(default_factory=list)
    context_prompts: list[int] = field(default_factory=list)
    # Who spoke in each context, the first one too, if each has a reward of its own: the reward of
    # its last turn. Otherwise empty, and all contexts share the rewards.
    context_roles: list[str] = field(default_factory=list)

    @property
    def last_turn(self) -> range:
        """The places of the tokens that the policy drew last; none if it failed."""
        if self.failure or not self.turns:
            return range(0)
        return range(self.turn_begins[len(self.turns) - 1], self.turns[-1])

    def count_call(self, tool: str, failed: bool) -> None:
        """Count a call of a tool, or one that cannot be read."""
        self.tools[tool] = self.tools.get(tool, 0) + 1
        self.errors += failed

    def set_reward(self, reward: float | Mapping[str, float] | None) -> None:
        """Keep what its environment says it is worth; a mapping has "score" and other numbers."""
        if isinstance(reward, Mapping):
            self.further = {name: number for name, number in reward.items() if name != "score"}
            reward = reward["score"]
        self.score = reward


@dataclass(frozen=True)
class Rollout:
    """Trajectories: row i of every tensor continues row i of `prompts`, repeated n times.

    A response may hold tokens that the policy did not draw, such as a tool's answer. The models
    read them, but they do not train.
    """

    prompts: Prompts  # one row a sample
    sample_index: list[int]  # number of the row among the n samples of its prompt
    response_ids: Tensor  # int32 [batch, response_len], zero after the end
    # bool [batch, response_len], True for each token of the response, its stop token included
    response_mask: Tensor
    # bool [batch, response_len], the tokens of `response_mask` that the policy drew; only these
    # train
    loss_mask: Tensor
    # float32 [batch, response_len], log-probabilities at the sampling temperature, from the engine;
    # 0 where `loss_mask` is False
    rollout_logprobs: Tensor
    # int32 [batch, response_len], version of the policy that drew each token; `NO_VERSION` where
    # `loss_mask` is False
    versions: Tensor
    # bool [batch], True if a stop token ended the response, False if the length limit did
    stopped: Tensor
    # The engine's experts for each row's prompt and response; None if not recorded.
    experts: ExpertRecord | None = None
    # Of each response token; None if sampling was not truncated.
    masks: SamplingMasks | None = None
    # What happened in each row beside its tokens; None without an environment.
    episodes: list[Episode] | None = None
    # float32 [batch, response_len], rewards that terms have placed on tokens; None if none has
    placed: Tensor | None = None

    def __post_init__(self) -> None:
        batch = len(self.prompts)
        assert self.episodes is None or len(self.episodes) == batch
        assert len(self.sample_index) == len(self.stopped) == batch, (
            f"{len(self.sample_index)} sample indices and {len(self.stopped)} stop flags for "
            f"{batch} prompts"
        )
        assert self.experts is None or len(self.experts.counts) == batch
        assert self.masks is None or self.masks.counts.shape == self.response_ids.shape

        shape = self.response_ids.shape
        assert shape[0] == batch, f"{shape[0]} responses to {batch} prompts"
        for table in (self.response_mask, self.loss_mask, self.rollout_logprobs, self.versions):
            assert table.shape == shape, f"{tuple(table.shape)} against tokens {tuple(shape)}"

        assert self.response_mask.dtype == self.loss_mask.dtype == torch.bool
        assert self.versions.dtype == torch.int32, f"versions are int32, not {self.versions.dtype}"
        for begin in range(0, batch, _ROWS_AT_ONCE):
            self._check(slice(begin, begin + _ROWS_AT_ONCE))

    def _check(self, rows: slice) -> None:
        """Check the tables of some rows; all at once would need as much memory again."""
        is_there = self.response_mask[rows]
        trains = self.loss_mask[rows]
        gaps = is_there[:, 1:] & ~is_there[:, :-1]
        assert not gaps.any(), "a response has a gap"
        assert not (trains & ~is_there).any(), "a token trains that is not there"
        assert torch.equal(self.versions[rows] != NO_VERSION, trains), (
            "exactly the tokens that train have a version"
        )
        assert not self.rollout_logprobs[rows][~trains].any(), (
            "a token that does not train has a log-probability"
        )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def shape(self) -> tuple[int, int]:
        """The size [batch, response_len] of the tables."""
        batch, width = self.response_ids.shape
        return batch, width

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each row's prompt."""
        return [len(tokens) for tokens in self.prompts.token_ids]

    @property
    def response_lengths(self) -> list[int]:
        """Tokens of each row's response, whether they train or not."""
        lengths: list[int] = np.count_nonzero(self.response_mask.numpy(), axis=1).tolist()
        return lengths

    def turn_rewards(self) -> Tensor | None:
        """The rewards of turns, each at the turn's last token, and those placed on other tokens.

        float32 [batch, response_len]; None if there are none.
        """
        episodes = self.episodes or []
        if self.placed is None and not any(episode.turn_rewards for episode in episodes):
            return None
        rewards = torch.zeros(self.shape) if self.placed is None else self.placed.clone()
        for row, episode in enumerate(episodes):
            for end, reward in zip(episode.turns, episode.turn_rewards, strict=False):
                rewards[row, end - 1] += reward
        return rewards * self.loss_mask

    def with_turn_rewards(self, scores: Tensor) -> Tensor:
        """Scores plus the rewards of all turns of their rows, both float32 [batch]."""
        of_turns = self.turn_rewards()
        return scores if of_turns is None else scores + of_turns.sum(dim=1)

    @property
    def given(self) -> Tensor:
        """Whether each row's response was given and not drawn, bool [batch]."""
        given = self.response_mask.any(dim=1) & ~self.loss_mask.any(dim=1)
        return given if self.episodes is None else torch.zeros_like(given)

    @property
    def prompt_groups(self) -> Tensor:
        """The number of each row's prompt group, int64 [batch]; a group's rows are adjacent."""
        return torch.tensor(self.sample_index, dtype=torch.int64).eq(0).cumsum(0) - 1

    def select(self, rows: Sequence[int]) -> Rollout:
        """The samples at `rows`, in that order."""
        index = torch.tensor(rows, dtype=torch.int64)
        tables: dict[str, Any] = {
            name: table[index] for name, table in vars(self).items() if isinstance(table, Tensor)
        }
        return Rollout(
            **tables,
            prompts=self.prompts.select(rows),
            sample_index=[self.sample_index[row] for row in rows],
            experts=None
            if self.experts is None
            else ExpertRecord.join([self.experts.of_rows(rows)]),
            masks=None
            if self.masks is None
            else SamplingMasks.join([self.masks.of_rows(rows)], self.masks.counts[index]),
            episodes=None if self.episodes is None else [self.episodes[row] for row in rows],
        )

    @staticmethod
    def join(parts: Sequence[Rollout]) -> Rollout:
        """The samples of all parts, one part after the other, padded to the longest response."""
        width = max(part.response_ids.shape[1] for part in parts)
        records = [part.experts for part in parts if part.experts is not None]
        assert len(records) in (0, len(parts)), "some parts have no record of experts"
        masks = [part.masks or SamplingMasks.none(part.shape) for part in parts]
        episodes = [part.episodes for part in parts if part.episodes is not None]
        assert len(episodes) in (0, len(parts)), "some parts have no episodes"

        def stack(tables: Sequence[Tensor], padding: int = 0) -> Tensor:
            padded = []
            for table in tables:
                missing = width - table.shape[1]
                padded.append(torch.nn.functional.pad(table, (0, missing), value=padding))
            return torch.cat(padded)

        return Rollout(
            prompts=Prompts.join([part.prompts for part in parts]),
            sample_index=[index for part in parts for index in part.sample_index],
            response_ids=stack([part.response_ids for part in parts]),
            response_mask=stack([part.response_mask for part in parts]),
            loss_mask=stack([part.loss_mask for part in parts]),
            rollout_logprobs=stack([part.rollout_logprobs for part in parts]),
            versions=stack([part.versions for part in parts], padding=NO_VERSION),
            stopped=torch.cat([part.stopped for part in parts]),
            experts=None if not records else ExpertRecord.join(records),
            masks=None
            if all(part.masks is None for part in parts)
            else SamplingMasks.join(masks, stack([x.counts for x in masks])),
            episodes=list(chain.from_iterable(episodes)) if episodes else None,
            placed=None
            if all(part.placed is None for part in parts)
            else stack([torch.zeros(x.shape) if x.placed is None else x.placed for x in parts]),
        )

    def sequences(self, prompt_ids: Sequence[Sequence[int]] | None = None) -> Sequences:
        """What the models read, without padding: a sequence for each context, row after row.

        `prompt_ids` are other prompts than the rows' own, one a row, as a teacher may read them.
        """
        prompt_ids = self.prompts.token_ids if prompt_ids is None else prompt_ids
        ends = np.cumsum([len(ids) for ids in prompt_ids])
        prompts = np.split(flat_ids(prompt_ids).numpy(), ends)
        # NumPy makes slices several times as fast as torch does.
        table = self.response_ids.int().numpy()
        parts = []
        found = []  # of each sequence its row, its first column, and the tokens of both parts
        for row, length in enumerate(self.response_lengths):
            episode = None if self.episodes is None else self.episodes[row]
            begins = [] if episode is None else episode.context_begins
            end = begins[0] if begins else length
            parts += [prompts[row], table[row, :end]]
            found.append((row, 0, len(prompts[row]), end))
            for number, begin in enumerate(begins):
                assert episode is not None
                prompt = episode.context_prompts[number]
                end = begins[number + 1] if number + 1 < len(begins) else length
                parts.append(table[row, begin:end])
                found.append((row, begin + prompt, prompt, end - begin - prompt))
        rows, columns, of_prompts, of_responses = torch.tensor(found).view(-1, 4).unbind(dim=1)
        lengths = of_prompts + of_responses
        return Sequences(
            token_ids=torch.from_numpy(np.concatenate(parts)),
            begins=lengths.cumsum(0) - lengths,
            lengths=lengths,
            prompt_lengths=of_prompts,
            width=self.shape[1],
            rows=rows,
            columns=columns,
            masks=self.masks,
        )


@dataclass(frozen=True)
class Experience:
    """A rollout with everything that the updates need.

    Tensors are float32 [batch, response_len] unless another type or shape is given.
    """

    rollout: Rollout
    # [batch], the reward of each whole response, those of turns included, before any shaping or KL
    scores: Tensor
    # bool, the tokens whose loss counts: the rollout's `loss_mask` without the tokens that rollout
    # correction rejected before the update. (In bypass mode correction is made on every mini-batch
    # of the update, and nothing is rejected here.)
    loss_mask: Tensor
    # Log-probabilities in the denominator of the probability ratio, fixed for the whole step: those
    # under the policy before this step's updates, or, in bypass mode, those of the engine. None
    # until the update's only pass over the batch has given them.
    old_logprobs: Tensor | None
    # Log-probabilities under the frozen reference, or None if no KL is used.
    ref_logprobs: Tensor | None
    token_rewards: Tensor  # shaped scores placed on tokens, with the KL subtracted
    # The critic's predictions before this step's updates, or None without a critic.
    values: Tensor | None
    # Advantages for the policy loss, whitened over the whole batch if the estimator asks for it.
    advantages: Tensor
    returns: Tensor  # regression targets for the critic
    # Factors of each token's policy loss that correct for the engine's policy, or None.
    weights: Tensor | None = None
    # bool [batch], True for right responses, or None if no reward term tells right from wrong
    positive: Tensor | None = None
    # The policy's choices in the pass that gave `old_logprobs`; None if the update does not replay
    # them.
    experts: ExpertRecord | None = None

    def __post_init__(self) -> None:
        assert not (self.loss_mask & ~self.rollout.loss_mask).any(), (
            "a token has a loss that the policy did not draw"
        )

"""Leads the samples of one replica through several turns, with tools and environments between them.

The engine draws a turn; its calls are run, or the environment replies; what they say is appended
in tokens, and the engine goes on with the next turn. Meanwhile it draws for the other samples: a
sample that waits takes no place in the batch. What was drawn is never decoded and encoded again.
All ranks of the replica do the same; the first of them has the environments and tells the others
what came of them. This file knows neither other replicas nor rewards.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

import torch.distributed as dist

from mrlhf.batch import Episode, Prompts
from mrlhf.data.tokenizer import Message, Tokenizer
from mrlhf.data.tool_calls import ParsedTurn
from mrlhf.data.turns import TurnRenderer
from mrlhf.environments.host import EnvironmentHost
from mrlhf.environments.interface import Outcome, Program, ToolCall
from mrlhf.errors import DataError
from mrlhf.inference.base import EngineStats, InferenceEngine, Request, Sample, SamplingParams
from mrlhf.parallel.groups import EngineGroups
from mrlhf.rollout.drawing import Drawn, MayStep, mix_seed
from mrlhf.rollout.trajectory import GrowingTrajectory, Trajectory

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.05  # for outcomes while the engine has nothing to draw
_UNREADABLE = "error"  # stands for the name of the tool in a call that cannot be read
_CUT = " [cut]"  # at the end of an answer that is too long

OnError = Literal["tell", "end"]


@dataclass(frozen=True)
class TurnLimits:
    """How far a conversation may go."""

    max_turns: int
    max_turn_tokens: int | None  # most tokens of one turn; None: as many as the response has room
    max_told_tokens: int  # most tokens of one answer of a tool or of the environment
    max_prompt_tokens: int  # most tokens of a prompt with the first observation
    on_parse_error: OnError  # tell the model, or end the episode
    on_tool_error: OnError


@dataclass(frozen=True)
class Dialogue:
    """How one kind of episode is led: its program, and how its turns become tokens and calls."""

    program: Program
    renderer: TurnRenderer


@dataclass
class _Conversation:
    """One sample on its way."""

    row: int
    request: Request  # of the first turn
    sample_index: int
    dialogue: Dialogue
    prompt_ids: Sequence[int]
    own_prompt: bool = False  # whether the environment has added to the prompt
    said: GrowingTrajectory = field(default_factory=GrowingTrajectory)
    turns: list[int] = field(default_factory=list)
    tools: Counter[str] = field(default_factory=Counter)
    errors: int = 0
    turn_rewards: list[float] = field(default_factory=list)
    waited_s: float = 0.0
    stopped: bool = False  # whether it ended by itself
    last: Sample | None = None  # what was drawn last
    recorded: int = 0  # for how many tokens `last` says which experts they went to


@dataclass
class Conversations:
    """Leads conversations on one replica."""

    groups: EngineGroups
    host: EnvironmentHost | None  # None on all ranks of the replica but the first
    dialogues: Mapping[str, Dialogue]  # by the name of the program
    program_of: Callable[[str], str]  # the name of the program of a data source
    parse: Callable[[str], ParsedTurn]
    tokenizer: Tokenizer
    limits: TurnLimits

    def draw(
        self,
        engine: InferenceEngine,
        prompts: Prompts,
        sampling: SamplingParams,
        requests: Sequence[Request],
        may_step: MayStep,
    ) -> Drawn:
        """Lead the samples of the requests to their end; arguments as for `draw_turn`.

        Raises:
            EngineError: the engine refuses a request, or fails.
        """
        run = _Run(self, engine, prompts, sampling, requests)
        try:
            return run.until_done(may_step)
        finally:
            run.close()

    def tell_ranks(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes that the first rank of the replica has, on all of its ranks."""
        if self.groups.tp.size() == 1:
            return outcomes
        box = [outcomes]
        first = dist.get_global_rank(self.groups.tp, 0)
        dist.broadcast_object_list(box, src=first, group=self.groups.tp)
        return box[0]

    def cut(self, text: str) -> str:
        """The text, without what is too long of it, and without special tokens.

        A tool that wrote the end of its message and the header of another would speak for others.
        """
        tokens = self.tokenizer.encode(text)
        plain = self.tokenizer.decode(tokens)
        if plain != self.tokenizer.decode(tokens, skip_special_tokens=False):
            text = plain
            tokens = self.tokenizer.encode(text)
        most = self.limits.max_told_tokens
        return text if len(tokens) <= most else self.tokenizer.decode(tokens[:most]) + _CUT


class _Run:
    """One batch of conversations. Each rank of the replica has the same."""

    def __init__(
        self,
        owner: Conversations,
        engine: InferenceEngine,
        prompts: Prompts,
        sampling: SamplingParams,
        requests: Sequence[Request],
    ) -> None:
        self._owner = owner
        self._limits = owner.limits
        self._host = owner.host
        self._engine = engine
        self._prompts = prompts
        self._sampling = sampling
        self._requests = requests
        self._batch = len(prompts) * sampling.n
        self._open: dict[int, _Conversation] = {}
        self._waiting: set[int] = set()  # rows that wait for an outcome
        self._beginning: dict[int, set[int]] = {}  # rows of a request that have not begun
        self._done: list[Trajectory] = []

    def until_done(self, may_step: MayStep) -> Drawn:
        """Lead all conversations, as far as `may_step` lets it."""
        self._begin()
        stats = EngineStats()
        unit = 0
        while self._open:
            if not may_step(unit, len(self._open)):
                finished = self._engine.cancel()
                return Drawn(self._done, stats + finished.stats)
            unit += 1
            if self._engine.in_flight:
                self._engine.step()
            finished = self._engine.collect()
            stats += finished.stats
            for sample in finished.samples:
                self._hear(sample)
            if self._waiting:
                self._learn_what_came()
        return Drawn(self._done, stats)

    def close(self) -> None:
        """Drop what is left of the conversations."""
        if not self._open:
            return
        with suppress(Exception):  # an error before is the one to report
            self._engine.cancel()
        for row in self._open:
            self._end_environment(row)

    def _begin(self) -> None:
        """Have the environments begin; a request draws once all of its samples have begun."""
        for request in self._requests:
            prompt = request.id // self._sampling.n
            program = self._owner.program_of(self._prompts.data_source[prompt])
            rows = [prompt * self._sampling.n + index for index in request.samples]
            for row, index in zip(rows, request.samples, strict=True):
                self._open[row] = _Conversation(
                    row, request, index, self._owner.dialogues[program], request.prompt
                )
                if self._host is not None:
                    seed = mix_seed(self._sampling.seed, f"{request.uid} {index}")
                    self._host.begin(row, program, self._data_row(prompt), seed)
            self._waiting.update(rows)
            self._beginning[request.id] = set(rows)

    def _data_row(self, prompt: int) -> dict[str, Any]:
        """The row of the data that an environment gets."""
        prompts = self._prompts
        return {
            **prompts.extra_info[prompt],
            "answer": prompts.ground_truth[prompt],
            "data_source": prompts.data_source[prompt],
            "uid": prompts.uid[prompt],
        }

    def _learn_what_came(self) -> None:
        """Go on with the conversations that need wait no longer."""
        outcomes: list[Outcome] = []
        if self._host is not None:
            outcomes = self._host.poll(0.0 if self._engine.in_flight else _IDLE_WAIT_S)
        for outcome in self._owner.tell_ranks(outcomes):
            self._waiting.remove(outcome.episode)
            conversation = self._open[outcome.episode]
            conversation.waited_s += outcome.seconds
            if outcome.failure is not None:
                self._fail(conversation, outcome.failure)
            elif outcome.kind == "reset":
                self._greet(conversation, outcome)
            elif outcome.kind == "turn":
                self._answer(conversation, outcome)
            else:
                self._finish(conversation, reward=outcome.reward)

    def _greet(self, conversation: _Conversation, outcome: Outcome) -> None:
        """Add the environment's first word to the prompt, and draw if the others have theirs."""
        row = conversation.row
        if outcome.observation is not None:
            prompt = self._prompts.extra_info[row // self._sampling.n]["prompt"]
            messages = _messages(prompt) + _messages(outcome.observation)
            try:
                conversation.prompt_ids = conversation.dialogue.renderer.first(messages)
            except DataError as error:
                self._fail(conversation, f"its first observation is no prompt: {error}")
                return
            conversation.own_prompt = True
            if len(conversation.prompt_ids) > self._limits.max_prompt_tokens:
                self._fail(
                    conversation,
                    f"the prompt has {len(conversation.prompt_ids)} tokens with the first "
                    f"observation, more than data.max_prompt_length "
                    f"{self._limits.max_prompt_tokens}",
                )
                return
        self._has_begun(conversation)

    def _has_begun(self, conversation: _Conversation) -> None:
        """Draw the first turn of all samples of a request once all have their prompt."""
        request = conversation.request
        beginning = self._beginning[request.id]
        beginning.discard(conversation.row)
        if beginning:
            return
        del self._beginning[request.id]
        first_row = request.id - request.samples.start
        alive = [
            self._open[row] for row in map(first_row.__add__, request.samples) if row in self._open
        ]

        # Samples with one prompt are one request, so that it is computed once.
        requests = []
        for (prompt, _), some in groupby(
            enumerate(alive),
            lambda item: (tuple(item[1].prompt_ids), item[1].sample_index - item[0]),
        ):
            same = [one for _, one in some]
            first = same[0]
            indices = range(first.sample_index, first.sample_index + len(same))
            requests.append(self._request(first, first.row, list(prompt), indices))
        self._engine.submit(requests)

    def _request(
        self, conversation: _Conversation, number: int, prompt: Sequence[int], samples: range
    ) -> Request:
        """The request for the next turn of some samples."""
        turn = len(conversation.turns)
        room = self._sampling.max_tokens - len(conversation.said)
        most = self._limits.max_turn_tokens
        seed = self._sampling.seed
        sampling = replace(
            self._sampling,
            max_tokens=room if most is None else min(room, most),
            seed=mix_seed(seed, f"turn {turn}") if turn else seed,
        )
        goes_on = turn + 1 < self._limits.max_turns
        return Request(
            id=number,
            prompt=prompt,
            uid=conversation.request.uid,
            samples=samples,
            sampling=sampling,
            goes_on=goes_on,
        )

    def _hear(self, sample: Sample) -> None:
        """Take what the engine has drawn, and have the environment answer it."""
        later = sample.request_id >= self._batch
        first = sample.request_id // self._sampling.n * self._sampling.n
        row = sample.request_id - self._batch if later else first + sample.sample_index
        conversation = self._open[row]
        before = len(conversation.prompt_ids) + len(conversation.said)
        conversation.said.add_drawn(sample)
        conversation.turns.append(len(conversation.said))
        conversation.last = sample
        if self._sampling.record_experts:
            conversation.recorded = before + len(sample.arrays[0]) - 1

        if not sample.stopped:
            self._ask_reward(conversation)
            return
        parsed = self._owner.parse(self._text(sample))
        if parsed.error is not None:
            conversation.errors += 1
            conversation.tools[_UNREADABLE] += 1
            if self._limits.on_parse_error == "end":
                self._ask_reward(conversation)
            else:
                self._tell(conversation, [_told(_UNREADABLE, f"Error: {parsed.error}")])
            return
        self._waiting.add(row)
        if self._host is not None:
            calls = [ToolCall(name, arguments) for name, arguments in parsed.calls]
            self._host.turn(row, parsed.content, calls)

    def _text(self, sample: Sample) -> str:
        """What was said, with special tokens but the one that ends it."""
        tokens = sample.token_ids
        if tokens[-1] in self._sampling.stop_token_ids:
            del tokens[-1]
        return self._owner.tokenizer.decode(tokens, skip_special_tokens=False)

    def _answer(self, conversation: _Conversation, outcome: Outcome) -> None:
        """Go on after a turn that the environment has seen."""
        for result in outcome.results:
            conversation.tools[result.name] += 1
            conversation.errors += result.is_error
        if outcome.turn_reward is not None:
            without = len(conversation.turns) - 1 - len(conversation.turn_rewards)
            conversation.turn_rewards += [0.0] * without + [outcome.turn_reward]

        has_error = any(result.is_error for result in outcome.results)
        ends = outcome.ended or (has_error and self._limits.on_tool_error == "end")
        if ends:
            conversation.stopped = True
            self._ask_reward(conversation)
            return
        results = [_told(result.name, result.content) for result in outcome.results]
        self._tell(conversation, results + _messages(outcome.observation))

    def _tell(self, conversation: _Conversation, messages: Sequence[Message]) -> None:
        """Append messages, and draw the next turn; without room or turns, end the episode."""
        said = conversation.said
        if len(conversation.turns) >= self._limits.max_turns:
            self._ask_reward(conversation)
            return
        assert conversation.last is not None
        try:
            cut = [
                {**message, "content": self._owner.cut(message["content"])} for message in messages
            ]
            tokens = conversation.dialogue.renderer.after(
                conversation.last.token_ids, conversation.last.stopped, cut
            )
        except DataError as error:
            self._fail(conversation, f"its answer cannot be written: {error}")
            return
        if len(said) + len(tokens) >= self._sampling.max_tokens:
            self._ask_reward(conversation)  # no room to say anything more
            return
        said.add_told(tokens)
        prompt = [*conversation.prompt_ids, *said.token_ids]
        index = conversation.sample_index
        number = self._batch + conversation.row
        self._engine.submit([self._request(conversation, number, prompt, range(index, index + 1))])

    def _ask_reward(self, conversation: _Conversation) -> None:
        """Ask what the episode is worth, if its environment says so; otherwise it is over."""
        if not conversation.dialogue.program.has_reward:
            self._finish(conversation)
            return
        self._waiting.add(conversation.row)
        if self._host is not None:
            self._host.ask_reward(conversation.row)

    def _fail(self, conversation: _Conversation, reason: str) -> None:
        """End an episode that cannot go on; none of its tokens train."""
        said = conversation.said
        if not len(said):
            said.add_told([self._owner.tokenizer.eos_id])
        said.untrained()
        conversation.stopped = False
        self._finish(conversation, failure=reason)
        if conversation.request.id in self._beginning:
            self._has_begun(conversation)

    def _finish(
        self,
        conversation: _Conversation,
        reward: float | Mapping[str, float] | None = None,
        failure: str = "",
    ) -> None:
        row = conversation.row
        del self._open[row]
        self._waiting.discard(row)
        self._end_environment(row)

        numbers = reward if isinstance(reward, Mapping) else {}
        score = numbers["score"] if isinstance(reward, Mapping) else reward
        said = conversation.said
        last = conversation.last
        ids = list(conversation.prompt_ids)
        own = conversation.own_prompt
        decode = self._owner.tokenizer.decode
        episode = Episode(
            prompt_ids=ids if own else None,
            prompt_text=decode(ids, skip_special_tokens=False) if own else "",
            turns=conversation.turns,
            tools=dict(conversation.tools),
            errors=conversation.errors,
            failure=failure,
            score=score,
            further={name: number for name, number in numbers.items() if name != "score"},
            turn_rewards=conversation.turn_rewards,
            waited_s=conversation.waited_s,
        )
        self._done.append(
            Trajectory(
                row=row,
                token_ids=said.token_ids,
                logprobs=said.logprobs,
                runs=tuple(said.runs),
                stopped=conversation.stopped,
                recorded=conversation.recorded,
                experts=None if last is None else last.experts,
                episode=episode,
            )
        )

    def _end_environment(self, row: int) -> None:
        if self._host is not None:
            self._host.end(row)


def _told(name: str, content: str) -> Message:
    """What a tool says."""
    return {"role": "tool", "name": name, "content": content}


def _messages(said: str | Sequence[Message] | None) -> list[Message]:
    """What an environment or a row says, as messages; a text is the user's."""
    if said is None:
        return []
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import Any, Literal

import torch.distributed as dist

from mrlhf.batch import Episode
from mrlhf.data.tokenizer import Message, Tokenizer
from mrlhf.data.tool_calls import ParsedTurn
from mrlhf.data.turns import TurnRenderer
from mrlhf.environments.host import EnvironmentHost
from mrlhf.environments.interface import Outcome, Program, ToolCall
from mrlhf.errors import DataError
from mrlhf.inference.base import InferenceEngine
from mrlhf.parallel.groups import EngineGroups
from mrlhf.rollout.drawing import Drawing, Drawn, MayStep, OpenSample, Pace, Task, mix_seed
from mrlhf.rollout.trajectory import Trajectory, turns_ended_by

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
class _Conversation(OpenSample):
    """One sample on its way; its prompt is what its environment has made of the data's."""

    dialogue: Dialogue = field(kw_only=True)
    number: int = field(kw_only=True)  # of its episode at the host
    own_prompt: bool = False  # whether the environment has added to the prompt
    begins: list[int] = field(default_factory=lambda: [0])  # of all turns, the present one too
    turns: list[int] = field(default_factory=list)
    tools: Counter[str] = field(default_factory=Counter)
    errors: int = 0
    turn_rewards: list[float] = field(default_factory=list)
    waited_s: float = 0.0
    stopped: bool = False  # whether it ended by itself
    replays: list[ParsedTurn] | None = None  # turns that its new environment must see before more


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
    # The episodes that wait for later weights, by seed, uid and sample index.
    _waiting: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def draw(
        self, engine: InferenceEngine, task: Task, pace: Pace | None, may_step: MayStep
    ) -> Drawn:
        """Lead the samples of the task to their end, as `Drawing` does with single turns.

        Raises:
            EngineError: the engine refuses a request, or fails.
        """
        return _Conversing(self, engine, task, pace).draw(may_step)

    def tell_ranks(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes that the first rank of the replica has, on all of its ranks."""
        if self.groups.tp.size() == 1:
            return outcomes
        box = [outcomes]
        first = dist.get_global_rank(self.groups.tp, 0)
        dist.broadcast_object_list(box, src=first, group=self.groups.tp)
        return box[0]

    def keep(self, one: OpenSample, number: int) -> None:
        """Let the episode of a sample wait for later weights."""
        self._waiting[_key(one)] = number

    def new_number(self) -> int:
        """The number of an episode that begins."""
        return next(self._numbers)

    def take_waiting(self, one: OpenSample) -> int | None:
        """The number of the episode of a sample, if it has waited for later weights here."""
        return self._waiting.pop(_key(one), None)

    def end_waiting(self) -> None:
        """End the episodes that nobody goes on with."""
        for number in self._waiting.values():
            self.end(number)
        self._waiting.clear()

    def end(self, number: int) -> None:
        """End an episode and all that it has started."""
        if self.host is not None:
            self.host.end(number)

    def turn_of(self, tokens: Sequence[int], stop_token_ids: Sequence[int]) -> ParsedTurn:
        """What the policy said in a turn, with special tokens but the one that ends it."""
        if tokens[-1] in stop_token_ids:
            tokens = tokens[:-1]
        return self.parse(self.tokenizer.decode(tokens, skip_special_tokens=False))

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


class _Conversing(Drawing[_Conversation]):
    """One task whose samples are conversations."""

    def __init__(
        self, owner: Conversations, engine: InferenceEngine, task: Task, pace: Pace | None
    ) -> None:
        super().__init__(engine, task, pace)
        self._owner = owner
        self._limits = owner.limits
        self._host = owner.host
        self._waiting: dict[int, int] = {}  # the rows that wait for an outcome, by episode
        self._beginning: dict[int, set[int]] = {}  # rows of a request that have not begun

    @property
    def _is_busy(self) -> bool:
        return bool(self._waiting) or super()._is_busy

    def _begin(self) -> None:
        """Have the environments begin; a request draws once all of its samples have begun."""
        resumed = []
        for plain in self._new_samples():
            program = self._owner.program_of(self._prompts.data_source[self._prompt_of(plain)])
            begun = self._task.begun.get(plain.row)
            waiting = None if begun is None else self._owner.take_waiting(plain)
            number = self._owner.new_number() if waiting is None else waiting
            one = _Conversation(
                **vars(plain), dialogue=self._owner.dialogues[program], number=number
            )
            self._open[one.row] = one
            if begun is None:
                self._beginning.setdefault(one.request.id, set()).add(one.row)
            else:
                self._recall(one, begun)
            one.turn_tokens = self._most_tokens(one)
            if waiting is not None:
                one.replays = None
                resumed.append(one)
                continue
            self._waiting[number] = one.row
            if self._host is not None:
                seed = mix_seed(one.request.sampling.seed, f"{one.request.uid} {one.sample_index}")
                self._host.begin(number, program, self._data_row(self._prompt_of(one)), seed)
        if self._pace is not None:
            self._owner.end_waiting()
        self._engine.submit(self._next_requests(resumed))

    def _recall(self, one: _Conversation, begun: Trajectory) -> None:
        """Take up a conversation where it was left."""
        episode = begun.episode
        assert episode is not None
        if episode.prompt_ids is not None:
            one.prompt_ids = episode.prompt_ids
            one.own_prompt = True
        one.begins = list(episode.turn_begins)
        one.turn_begins = one.begins[-1]
        one.turns = list(episode.turns)
        # They are of the present version if an interruption came after the drawing.
        one.turns_now = turns_ended_by(self._engine.version, one.said.runs, one.turns)
        one.tools = Counter(episode.tools)
        one.errors = episode.errors
        one.turn_rewards = list(episode.turn_rewards)
        one.waited_s = episode.waited_s

        turns = zip(one.begins, one.turns, strict=False)
        parsed = [self._parsed(one.said.token_ids[begin:end]) for begin, end in turns]
        one.replays = [turn for turn in parsed if turn.error is None]

    def _data_row(self, prompt: int) -> dict[str, Any]:
        """The row of the data that an environment gets."""
        prompts = self._prompts
        return {
            **prompts.extra_info[prompt],
            "answer": prompts.ground_truth[prompt],
            "data_source": prompts.data_source[prompt],
            "uid": prompts.uid[prompt],
        }

    def _look_around(self) -> None:
        """Go on with the conversations that need wait no longer."""
        if not self._waiting:
            return
        outcomes: list[Outcome] = []
        if self._host is not None:
            outcomes = self._host.poll(0.0 if self._engine.in_flight else _IDLE_WAIT_S)
        for outcome in self._owner.tell_ranks(outcomes):
            one = self._open[self._waiting.pop(outcome.episode)]
            one.waited_s += outcome.seconds
            if outcome.failure is not None:
                self._fail(one, outcome.failure)
            elif one.replays is not None:
                self._replay(one, one.replays)
            elif outcome.kind == "reset":
                self._greet(one, outcome)
            elif outcome.kind == "turn":
                self._answer(one, outcome)
            else:
                self._finish(one, reward=outcome.reward)

    def _replay(self, one: _Conversation, turns: list[ParsedTurn]) -> None:
        """Show a new environment the next of the turns that were before it; then draw."""
        if turns:
            self._show(one, turns.pop(0))
        else:
            one.replays = None
            self._engine.submit(self._next_requests([one]))

    def _show(self, one: _Conversation, turn: ParsedTurn) -> None:
        """Let the environment answer a turn."""
        self._waiting[one.number] = one.row
        if self._host is not None:
            calls = [ToolCall(name, arguments) for name, arguments in turn.calls]
            self._host.turn(one.number, turn.content, calls)

    def _greet(self, one: _Conversation, outcome: Outcome) -> None:
        """Add the environment's first word to the prompt, and draw if the others have theirs."""
        if outcome.observation is not None:
            prompt = self._prompts.extra_info[self._prompt_of(one)]["prompt"]
            messages = _messages(prompt) + _messages(outcome.observation)
            try:
                one.prompt_ids = one.dialogue.renderer.first(messages)
            except DataError as error:
                self._fail(one, f"its first observation is no prompt: {error}")
                return
            one.own_prompt = True
            if len(one.prompt_ids) > self._limits.max_prompt_tokens:
                self._fail(
                    one,
                    f"the prompt has {len(one.prompt_ids)} tokens with the first "
                    f"observation, more than data.max_prompt_length "
                    f"{self._limits.max_prompt_tokens}",
                )
                return
        self._has_begun(one)

    def _has_begun(self, one: _Conversation) -> None:
        """Draw the first turn of all samples of a request once all have their prompt."""
        request = one.request
        beginning = self._beginning[request.id]
        beginning.discard(one.row)
        if beginning:
            return
        del self._beginning[request.id]
        first_row = request.id - request.samples.start
        alive = [
            self._open[row] for row in map(first_row.__add__, request.samples) if row in self._open
        ]

        # Samples with one prompt are one request, so that it is computed once.
        requests = []
        for _, some in groupby(
            enumerate(alive),
            lambda item: (tuple(item[1].prompt_ids), item[1].sample_index - item[0]),
        ):
            same = [one for _, one in some]
            first = same[0]
            indices = range(first.sample_index, first.sample_index + len(same))
            requests.append(self._request(first, indices))
        self._engine.submit(requests)

    def _most_tokens(self, one: _Conversation) -> int:
        """The most tokens of the turn that begins now."""
        room = self._sampling.max_tokens - one.turn_begins
        most = self._limits.max_turn_tokens
        return room if most is None else min(room, most)

    def _goes_on(self, one: _Conversation) -> bool:
        return super()._goes_on(one) or len(one.turns) + 1 < self._limits.max_turns

    def _seed(self, one: _Conversation, seed: int) -> int:
        turn = len(one.turns)
        return mix_seed(seed, f"turn {turn}") if turn else seed

    def _parsed(self, tokens: Sequence[int]) -> ParsedTurn:
        return self._owner.turn_of(tokens, self._sampling.stop_token_ids)

    def _turn_ends(self, one: _Conversation, stopped: bool) -> None:
        """Have the environment answer a turn."""
        one.turns.append(len(one.said))
        if not stopped:
            self._ask_reward(one)
            return
        parsed = self._parsed(one.said.token_ids[one.turn_begins :])
        if parsed.error is None:
            self._show(one, parsed)
            return
        one.errors += 1
        one.tools[_UNREADABLE] += 1
        if self._limits.on_parse_error == "end":
            self._ask_reward(one)
        else:
            self._tell(one, [_told(_UNREADABLE, f"Error: {parsed.error}")])

    def _answer(self, one: _Conversation, outcome: Outcome) -> None:
        """Go on after a turn that the environment has seen."""
        for result in outcome.results:
            one.tools[result.name] += 1
            one.errors += result.is_error
        if outcome.turn_reward is not None:
            without = len(one.turns) - 1 - len(one.turn_rewards)
            one.turn_rewards += [0.0] * without + [outcome.turn_reward]

        has_error = any(result.is_error for result in outcome.results)
        ends = outcome.ended or (has_error and self._limits.on_tool_error == "end")
        if ends:
            one.stopped = True
            self._ask_reward(one)
            return
        results = [_told(result.name, result.content) for result in outcome.results]
        self._tell(one, results + _messages(outcome.observation))

    def _tell(self, one: _Conversation, messages: Sequence[Message]) -> None:
        """Append messages, and draw the next turn; without room or turns, end the episode."""
        said = one.said
        if len(one.turns) >= self._limits.max_turns:
            self._ask_reward(one)
            return
        try:
            cut = [
                {**message, "content": self._owner.cut(message["content"])} for message in messages
            ]
            # A turn that is told something was ended by an end token or a stop string.
            drawn = said.token_ids[one.turn_begins :].tolist()
            tokens = one.dialogue.renderer.after(drawn, True, cut)
        except DataError as error:
            self._fail(one, f"its answer cannot be written: {error}")
            return
        if len(said) + len(tokens) >= self._sampling.max_tokens:
            self._ask_reward(one)  # no room to say anything more
            return
        said.add_told(tokens)
        one.turn_begins = len(said)
        one.begins.append(one.turn_begins)
        one.turn_tokens = self._most_tokens(one)
        self._engine.submit(self._next_requests([one]))

    def _ask_reward(self, one: _Conversation) -> None:
        """Ask what the episode is worth, if its environment says so; otherwise it is over."""
        if not one.dialogue.program.has_reward:
            self._finish(one)
            return
        self._waiting[one.number] = one.row
        if self._host is not None:
            self._host.ask_reward(one.number)

    def _fail(self, one: _Conversation, reason: str) -> None:
        """End an episode that cannot go on; none of its tokens train."""
        said = one.said
        if not len(said):
            one.begins = []
            said.add_told([self._owner.tokenizer.eos_id])
        said.untrained()
        one.stopped = False
        self._finish(one, failure=reason)
        if one.request.id in self._beginning:
            self._has_begun(one)

    def _finish(
        self,
        one: _Conversation,
        reward: float | Mapping[str, float] | None = None,
        failure: str = "",
    ) -> None:
        self._owner.end(one.number)
        self._waiting.pop(one.number, None)
        episode = self._episode(one)
        if isinstance(reward, Mapping):
            further = {name: number for name, number in reward.items() if name != "score"}
            episode = replace(episode, score=reward["score"], further=further)
        else:
            episode = replace(episode, score=reward)
        self._end(one, one.stopped, replace(episode, failure=failure))

    def _put_aside(self, one: _Conversation) -> Trajectory:
        self._owner.keep(one, one.number)
        return replace(super()._put_aside(one), episode=self._episode(one))

    def _episode(self, one: _Conversation) -> Episode:
        """What has happened so far."""
        ids = list(one.prompt_ids)
        own = one.own_prompt
        decode = self._owner.tokenizer.decode
        return Episode(
            prompt_ids=ids if own else None,
            prompt_text=decode(ids, skip_special_tokens=False) if own else "",
            turn_begins=one.begins,
            turns=one.turns,
            tools=dict(one.tools),
            errors=one.errors,
            failure="",
            score=None,
            further={},
            turn_rewards=one.turn_rewards,
            waited_s=one.waited_s,
        )

    def _abandon(self) -> None:
        for one in self._open.values():
            self._owner.end(one.number)


def _key(one: OpenSample) -> tuple[int, int, int]:
    return one.request.sampling.seed, one.request.uid, one.sample_index


def _told(name: str, content: str) -> Message:
    """What a tool says."""
    return {"role": "tool", "name": name, "content": content}


def _messages(said: str | Sequence[Message] | None) -> list[Message]:
    """What an environment or a row says, as messages; a text is the user's."""
    if said is None:
        return []
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)

"""Leads the samples of one replica through several turns, with tools and environments between them.

The engine draws a turn; its calls are run, or the environment replies; what they say is appended
in tokens, and the engine goes on with the next turn. Or a function of the user's asks for turns and
returns trajectories. Meanwhile the engine draws for the other samples: one that waits takes no
place in the batch. What was drawn is never decoded and encoded again. All ranks of the replica do
the same; the first of them has the environments and tells the others what came of them. This file
knows neither other replicas nor rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from mrlhf.batch import Episode
from mrlhf.data.tokenizer import Message
from mrlhf.data.tool_calls import ParsedTurn
from mrlhf.data.turns import Turn
from mrlhf.environments.interface import Outcome, ToolCall, as_messages
from mrlhf.errors import DataError
from mrlhf.inference.base import InferenceEngine, Sample
from mrlhf.rollout.asked_turns import AskedTurns
from mrlhf.rollout.branches import BranchError
from mrlhf.rollout.conversations import UNREADABLE, Conversation, Conversations
from mrlhf.rollout.drawing import Drawing, Pace, Task, mix_seed
from mrlhf.rollout.trajectory import Trajectory, turns_ended_by

_IDLE_WAIT_S = 1.0  # for outcomes while the engine has nothing to draw


class Conversing(Drawing[Conversation]):
    """One task whose samples are conversations."""

    def __init__(
        self,
        owner: Conversations,
        engine: InferenceEngine,
        task: Task,
        pace: Pace | None,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Lead the samples of the task to their end, or only as far as `pace` lets them.

        Once the run `is_stopping`, nothing waits: all ranks have to come to one step of the engine,
        and a replica that waits for outcomes counts steps as well.
        """
        super().__init__(engine, task, pace)
        self._owner = owner
        self._limits = owner.limits
        self._host = owner.host
        self._is_stopping = is_stopping
        self._waiting: dict[int, int] = {}  # the rows that wait for an outcome, by episode
        self._beginning: dict[int, set[int]] = {}  # rows of a request that have not begun
        # Other requests have ids below.
        self._functions = AskedTurns(owner, task.sampling, first_id=2 * self._batch)

    @property
    def _is_busy(self) -> bool:
        return bool(self._waiting) or super()._is_busy

    def _begin(self) -> None:
        """Have the environments begin; a request draws once all of its samples have begun."""
        resumed = []
        for plain in self._new_samples():
            program = self._owner.program_of(self._prompts.data_source[self._prompt_of(plain)])
            begun = self._task.begun.get(plain.row)
            earlier = None if begun is None else self._owner.take_waiting(plain)
            number = self._owner.new_number() if earlier is None else earlier.number
            one = Conversation(
                **vars(plain), dialogue=self._owner.dialogues[program], number=number
            )
            self._open[one.row] = one
            is_function = one.dialogue.program.is_function
            if begun is not None:
                self._recall(one, begun)
            elif not is_function:
                self._beginning.setdefault(one.request.id, set()).add(one.row)
            one.turn_tokens = self._most_tokens(one)
            if earlier is not None:
                one.replays = None
                one.messages, one.history = earlier.messages, earlier.history
                one.text = earlier.text
                resumed.append(one)
                continue
            self._waiting[number] = one.row
            if self._host is not None:
                seed = mix_seed(one.request.sampling.seed, f"{one.request.uid} {one.sample_index}")
                row = self._prompts.row(self._prompt_of(one))
                self._host.begin(number, program, row, seed, self._functions.sampling)
        if self._pace is not None:
            self._owner.end_waiting()
        self._engine.submit(self._next_requests(resumed))

    def _recall(self, one: Conversation, begun: Trajectory) -> None:
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
        one.context_begins = list(episode.context_begins)
        one.context_prompts = list(episode.context_prompts)

        turns = zip(one.begins, one.turns, strict=False)
        one.replays = [one.said.token_ids[begin:end].tolist() for begin, end in turns]

    def _look_around(self) -> None:
        """Go on with the conversations that need wait no longer."""
        if not self._waiting:
            return
        outcomes: list[Outcome] = []
        if self._host is not None:
            is_idle = not self._engine.in_flight and not self._is_stopping()
            outcomes = self._host.poll(_IDLE_WAIT_S if is_idle else 0.0)
            outcomes = [one for one in outcomes if not self._owner.answer_render(one)]
        for outcome in self._owner.tell_ranks(outcomes):
            row = self._waiting.get(outcome.episode)
            if row is None:  # a rollout function that has failed since it asked
                continue
            one = self._open[row]
            one.waited_s += outcome.seconds
            if outcome.question is not None:
                self._engine.submit(self._functions.ask(one, outcome.question))
                continue
            del self._waiting[outcome.episode]
            if outcome.failure is not None:
                self._fail(one, outcome.failure)
            elif one.replays is not None:
                self._replay(one, one.replays, outcome)
            elif outcome.kind == "reset":
                self._greet(one, outcome)
            elif outcome.kind == "turn":
                self._answer(one, outcome)
            elif outcome.kind == "rollout":
                self._weave(one, outcome)
            else:
                self._finish(one, reward=outcome.reward)

    def _hear(self, sample: Sample) -> None:
        if not self._functions.take(sample, self._open):
            super()._hear(sample)

    def _weave(self, one: Conversation, outcome: Outcome) -> None:
        """Make a response of what a rollout function returned."""
        try:
            woven = one.branches.weave(outcome.trajectories)
        except BranchError as error:
            self._fail(one, f"the rollout function: {error}")
            return
        one.prompt_ids, one.own_prompt = woven.prompt_ids, True
        one.said, one.begins, one.turns = woven.said, woven.turn_begins, woven.turns
        one.turn_rewards, one.stopped = woven.turn_rewards, woven.stopped
        one.context_begins, one.context_prompts = woven.context_begins, woven.context_prompts
        one.context_roles = woven.context_roles
        self._finish(one, reward=woven.reward)

    def _replay(self, one: Conversation, turns: list[list[int]], outcome: Outcome) -> None:
        """Show a new environment the next of the turns that were before it; then draw."""
        if outcome.kind == "reset":
            one.messages = self._first_messages(one, outcome)
        else:
            self._remember(one, turns.pop(0), _answers(outcome))
        while turns:
            parsed = self._parsed(turns[0])
            if parsed.error is None:
                self._show(one, parsed)
                return
            self._remember(one, turns.pop(0), [_unreadable(parsed.error)])
        one.replays = None
        if one.history:
            try:
                one.text, _ = one.dialogue.renderer.goes_on(one.messages, one.history, "")
            except DataError as error:
                self._fail(one, f"its replayed answers cannot be written: {error}")
                return
        self._engine.submit(self._next_requests([one]))

    def _remember(self, one: Conversation, drawn: list[int], messages: Sequence[Message]) -> None:
        """Keep a turn and what followed it, if the template may make a new context of them."""
        if self._limits.on_rewrite == "split":
            one.history.append(Turn(drawn, True, self._owner.cut_all(messages)))

    def _show(self, one: Conversation, turn: ParsedTurn) -> None:
        """Let the environment answer a turn."""
        self._waiting[one.number] = one.row
        if self._host is not None:
            calls = [ToolCall(name, arguments) for name, arguments in turn.calls]
            self._host.turn(one.number, turn.content, calls)

    def _greet(self, one: Conversation, outcome: Outcome) -> None:
        """Add the environment's first word to the prompt, and draw if the others have theirs."""
        one.messages = self._first_messages(one, outcome)
        if outcome.observation is not None:
            try:
                prompt = one.dialogue.renderer.first(one.messages)
            except DataError as error:
                self._fail(one, f"its first observation is no prompt: {error}")
                return
            most = self._limits.max_prompt_tokens
            if len(prompt) > most:  # the models read what fails too, so it keeps the data's prompt
                self._fail(
                    one,
                    f"the prompt has {len(prompt)} tokens with the first observation, more than "
                    f"data.max_prompt_length {most}",
                )
                return
            one.prompt_ids = prompt
            one.own_prompt = True
        self._has_begun(one)

    def _first_messages(self, one: Conversation, outcome: Outcome) -> list[Message]:
        """The messages of the prompt, given what the environment said at its reset."""
        prompt = self._prompts.extra_info[self._prompt_of(one)]["prompt"]
        return as_messages(prompt) + as_messages(outcome.observation)

    def _has_begun(self, one: Conversation) -> None:
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

    def _room(self, one: Conversation) -> int:
        """How many tokens more the present context may have."""
        if not one.context_begins:
            return self._sampling.max_tokens - len(one.said)
        return self._limits.max_length(self._sampling) - (len(one.said) - one.context_begins[-1])

    def _context(self, one: Conversation) -> list[int]:
        if not one.context_begins:
            return super()._context(one)
        return one.said.token_ids[one.context_begins[-1] :].tolist()

    def _most_tokens(self, one: Conversation) -> int:
        """The most tokens of the turn that begins now, or has begun."""
        room = self._room(one) + one.drawn
        most = self._limits.max_turn_tokens
        return room if most is None else min(room, most)

    def _goes_on(self, one: Conversation) -> bool:
        return super()._goes_on(one) or len(one.turns) + 1 < self._limits.max_turns

    def _seed(self, one: Conversation, seed: int) -> int:
        turn = len(one.turns)
        return mix_seed(seed, f"turn {turn}") if turn else seed

    def _parsed(self, tokens: Sequence[int]) -> ParsedTurn:
        return self._owner.parse(self._owner.text_of(tokens, self._sampling.stop_token_ids))

    def _turn_ends(self, one: Conversation, stopped: bool) -> None:
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
        one.tools[UNREADABLE] += 1
        if self._limits.on_parse_error == "end":
            self._ask_reward(one)
        else:
            self._tell(one, [_unreadable(parsed.error)])

    def _answer(self, one: Conversation, outcome: Outcome) -> None:
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
        self._tell(one, _answers(outcome))

    def _tell(self, one: Conversation, messages: Sequence[Message]) -> None:
        """Append messages, and draw the next turn; without room or turns, end the episode."""
        said = one.said
        if len(one.turns) >= self._limits.max_turns:
            self._ask_reward(one)
            return
        try:
            tokens, is_new = self._told_tokens(one, messages)
        except DataError as error:
            self._fail(one, f"its answer cannot be written: {error}")
            return
        if len(tokens) >= (self._limits.max_length(self._sampling) if is_new else self._room(one)):
            self._ask_reward(one)  # no room to say anything more
            return
        if is_new:
            one.context_begins.append(len(said))
            one.context_prompts.append(len(tokens))
        said.add_told(tokens)
        one.turn_begins = len(said)
        one.begins.append(one.turn_begins)
        one.turn_tokens = self._most_tokens(one)
        self._engine.submit(self._next_requests([one]))

    def _told_tokens(
        self, one: Conversation, messages: Sequence[Message]
    ) -> tuple[list[int], bool]:
        """The tokens that follow the last turn, and whether they begin a context; or DataError."""
        renderer = one.dialogue.renderer
        # A turn that is told something was ended by an end token or a stop string.
        drawn = one.said.token_ids[one.turn_begins :].tolist()
        tokens = renderer.after(drawn, True, self._owner.cut_all(messages))
        if self._limits.on_rewrite != "split":
            return tokens, False
        before = one.text or renderer.text(one.messages)
        self._remember(one, drawn, messages)
        one.text, new = renderer.goes_on(one.messages, one.history, before)
        return (tokens, False) if new is None else (new, True)

    def _ask_reward(self, one: Conversation) -> None:
        """Ask what the episode is worth, if its environment says so; otherwise it is over."""
        if not one.dialogue.program.has_reward:
            self._finish(one)
            return
        self._waiting[one.number] = one.row
        if self._host is not None:
            self._host.ask_reward(one.number)

    def _fail(self, one: Conversation, reason: str) -> None:
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
        one: Conversation,
        reward: float | Mapping[str, float] | None = None,
        failure: str = "",
    ) -> None:
        self._owner.end(one.number)
        self._waiting.pop(one.number, None)
        if one.context_begins or one.dialogue.program.is_function:
            one.recorded, one.experts = 0, None  # of the last context alone
        episode = self._episode(one)
        if isinstance(reward, Mapping):
            further = {name: number for name, number in reward.items() if name != "score"}
            episode = replace(episode, score=reward["score"], further=further)
        else:
            episode = replace(episode, score=reward)
        self._end(one, one.stopped, replace(episode, failure=failure))

    def _put_aside(self, one: Conversation) -> Trajectory:
        one.experts = None  # the engine records all of them again
        self._owner.keep(one)
        return replace(super()._put_aside(one), episode=self._episode(one))

    def _episode(self, one: Conversation) -> Episode:
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
            context_begins=one.context_begins,
            context_prompts=one.context_prompts,
            context_roles=one.context_roles,
        )

    def _abandon(self) -> None:
        for one in self._open.values():
            self._owner.end(one.number)


def _answers(outcome: Outcome) -> list[Message]:
    """What tools and environment say after a turn."""
    results = [_told(result.name, result.content) for result in outcome.results]
    return results + as_messages(outcome.observation)


def _unreadable(error: str) -> Message:
    """What the policy is told of a call that cannot be read."""
    return _told(UNREADABLE, f"Error: {error}")


def _told(name: str, content: str) -> Message:
    """What a tool says."""
    return {"role": "tool", "name": name, "content": content}

"""Draws the episodes of one replica: their turns, and tools and environments between them.

The engine draws a turn; its calls are run, or the environment replies; their answers are appended
in tokens, and the engine goes on with the next turn. Or a function of the user's asks for turns and
returns trajectories. Meanwhile the engine draws for the other samples: one that waits takes no
place in the batch. What was drawn is never decoded and encoded again. All ranks of the replica do
the same; the first of them has the environments and sends their outcomes to the others. This file
knows neither other replicas nor rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from mrlhf.batch import Episode
from mrlhf.data.tokenizer import Message
from mrlhf.episodes.environments.host import EnvironmentHost
from mrlhf.episodes.environments.protocol import Answer, Outcome, Question, ToolResult, as_messages
from mrlhf.episodes.functions import FunctionError, NoRoomError
from mrlhf.episodes.replica import UNREADABLE, OpenEpisode, ReplicaEpisodes
from mrlhf.episodes.template import Turn
from mrlhf.episodes.tool_calls import ParsedTurn
from mrlhf.errors import DataError
from mrlhf.inference.base import InferenceEngine, Request, Sample
from mrlhf.rollout.drawing import (
    OpenSample,
    Pace,
    RequestId,
    Sampler,
    Task,
    TaskRunner,
    mix_seed,
)

_IDLE_WAIT_S = 1.0  # for outcomes while the engine has nothing to draw


@dataclass
class EpisodeSampler(Sampler):
    """Draws samples as episodes, the tasks of one replica one after the other."""

    replica: ReplicaEpisodes
    is_stopping: Callable[[], bool]  # whether the run stops, so that nothing waits any longer
    has_episodes = True

    def drawing(self, engine: InferenceEngine, task: Task, pace: Pace | None) -> EpisodeRunner:
        """See `Sampler`."""
        return EpisodeRunner(self.replica, engine, task, pace, self.is_stopping)

    def fits(self, episode: Episode | None, length: int, ended: bool, most: int) -> bool:
        """See `Sampler`."""
        return episode is not None and self.replica.limits.fits(episode, length, ended)


class EpisodeRunner(TaskRunner[OpenEpisode]):
    """Draws a task whose samples are episodes."""

    def __init__(
        self,
        replica: ReplicaEpisodes,
        engine: InferenceEngine,
        task: Task,
        pace: Pace | None,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Draw the episodes to their end, or only as far as `pace` lets them.

        Once the run `is_stopping`, nothing waits: all ranks have to come to one step of the engine,
        and a replica that waits for outcomes counts steps as well.
        """
        super().__init__(engine, task, pace)
        self._replica = replica
        self._limits = replica.limits
        self._host = replica.host
        self._is_stopping = is_stopping
        self._waiting: dict[int, int] = {}  # the rows that wait for an outcome, by episode
        # The rows of each request that have not begun.
        self._beginning: dict[RequestId, set[int]] = {}
        # The questions of rollout functions that ask for turns, by the requests for these.
        self._questions: dict[RequestId, Question] = {}

    @property
    def _is_busy(self) -> bool:
        return bool(self._waiting) or super()._is_busy

    def _begin(self) -> None:
        """Have the environments begin; a request draws once all of its samples have begun."""
        resumed = []
        for plain in self._new_samples():
            has_begun = plain.row in self._task.begun
            earlier = self._replica.waiting.pop(plain.key, None) if has_begun else None
            sample = self._open_episode(plain, earlier)
            self._open[sample.row] = sample

            if has_begun:
                self._resume(sample)
            elif not sample.program.is_function:
                self._beginning.setdefault(sample.request.id, set()).add(sample.row)
            sample.turn_tokens = self._limits.turn_tokens(sample.episode)
            if earlier is None:
                self._begin_environment(sample)
            else:
                sample.replays = None
                resumed.append(sample)
        if self._pace is not None:
            self._replica.end_waiting()
        self._engine.submit(self._next_requests(resumed))

    def _open_episode(self, plain: OpenSample, earlier: OpenEpisode | None) -> OpenEpisode:
        """The episode of a sample; `earlier` is what has waited here for later weights of it."""
        environments = self._replica.environments
        name = environments.program_of(self._prompts.data_source[plain.request.id.prompt])
        sample = OpenEpisode(
            **{**vars(plain), "episode": plain.episode or Episode()},
            program=environments.programs[name],
            renderer=environments.renderers[name],
            number=next(self._replica.numbers) if earlier is None else earlier.number,
        )
        if earlier is not None:
            sample.messages = earlier.messages
            sample.history = earlier.history
        return sample

    def _resume(self, sample: OpenEpisode) -> None:
        """Take up an episode where it was left."""
        episode = sample.episode
        if episode.prompt_ids is not None:
            sample.prompt_ids = episode.prompt_ids
        # They are of the present version if an interruption came after the drawing.
        sample.turns_now = sample.turns_ended_by(self._engine.version)
        turns = zip(episode.turn_begins, episode.turns, strict=False)
        sample.replays = [sample.token_ids[begin:end].tolist() for begin, end in turns]

    def _begin_environment(self, sample: OpenEpisode) -> None:
        request = sample.request
        sampling = {
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "top_k": self._sampling.top_k,
            "min_p": self._sampling.min_p,
            "max_tokens": self._limits.max_length,
            "max_turns": self._limits.max_turns,
        }
        name = sample.program.name
        row = self._prompts.row(request.id.prompt)
        seed = mix_seed(request.sampling.seed, f"{request.uid} {sample.sample_index}")
        self._ask(sample, lambda host: host.begin(sample.number, name, row, seed, sampling))

    def _ask(self, sample: OpenEpisode, ask: Callable[[EnvironmentHost], None]) -> None:
        """Ask something of the environment of a sample, which waits for the outcome."""
        self._waiting[sample.number] = sample.row
        if self._host is not None:
            ask(self._host)

    def _between_steps(self) -> None:
        """Go on with the episodes that need wait no longer."""
        if not self._waiting:
            return
        outcomes: list[Outcome] = []
        if self._host is not None:
            is_idle = not self._engine.in_flight and not self._is_stopping()
            found = self._host.poll(_IDLE_WAIT_S if is_idle else 0.0)
            outcomes = [outcome for outcome in found if not self._render_for(outcome)]
        for outcome in self._replica.on_all_ranks(outcomes):
            row = self._waiting.get(outcome.episode)
            if row is not None:  # else a rollout function that has failed since it asked
                self._on_outcome(self._open[row], outcome)

    def _render_for(self, outcome: Outcome) -> bool:
        """Answer a rollout function that asks for tokens or a text; False if it does not.

        Only the first rank of the replica is asked, and the others need not know of it.
        """
        question = outcome.question
        if question is None or question.what == "generate":
            return False
        row = self._waiting.get(outcome.episode)
        if row is not None:
            answer = self._replica.render(question, self._open[row].renderer)
            self._replica.answer(outcome.episode, answer)
        return True

    def _on_outcome(self, sample: OpenEpisode, outcome: Outcome) -> None:
        sample.episode.waited_s += outcome.seconds
        if outcome.question is not None:
            self._on_question(sample, outcome.question)
            return

        del self._waiting[outcome.episode]
        if outcome.failure is not None:
            self._fail(sample, outcome.failure)
        elif sample.replays is not None:
            self._replay(sample, sample.replays, outcome)
        elif outcome.kind == "reset":
            self._on_reset(sample, outcome)
        elif outcome.kind == "turn":
            self._on_answer(sample, outcome)
        elif outcome.kind == "rollout":
            self._on_function_return(sample, outcome)
        else:
            sample.episode.set_reward(outcome.reward)
            self._finish(sample)

    def _on_drawn(self, drawn: Sample) -> None:
        question = self._questions.pop(drawn.request_id, None)
        if question is None:
            super()._on_drawn(drawn)
            return
        asked = drawn.request_id
        sample = self._open.get(asked.prompt * self._sampling.n + asked.sample)
        if sample is not None:  # else the function has ended without waiting for it
            sample.asked.drawn[asked.part] = drawn
            self._answer_question(sample, question, drawn, asked.part)

    def _on_question(self, sample: OpenEpisode, question: Question) -> None:
        """Draw a turn for a rollout function, or tell it that there cannot be one."""
        ids = question.arguments["token_ids"]
        most = question.arguments["max_tokens"]
        known = self._replica.tokenizer.ids
        try:
            turn, most, name = sample.asked.ask(ids, most, self._limits, known)
        except FunctionError as error:
            no_room = isinstance(error, NoRoomError)
            answer = Answer(question.number, str(error), "no room" if no_room else "error")
            self._replica.answer(sample.number, answer)
            return

        sampling = sample.request.sampling
        request = Request(
            id=RequestId(sample.request.id.prompt, sample.sample_index, turn),
            prompt=ids,
            uid=sample.request.uid,
            samples=range(sample.sample_index, sample.sample_index + 1),
            sampling=replace(sampling, max_tokens=most, seed=mix_seed(sampling.seed, name)),
            goes_on=True,
        )
        self._questions[request.id] = question
        self._engine.submit([request])

    def _answer_question(
        self, sample: OpenEpisode, question: Question, drawn: Sample, turn: int
    ) -> None:
        """Give a rollout function the turn that was drawn for it."""
        text = self._replica.text_of(drawn.token_ids, self._sampling.stop_token_ids)
        answer = {
            "token_ids": drawn.token_ids,
            "text": text,
            "stopped": drawn.stopped,
            "draw": turn,
        }

        if question.arguments["reads_calls"]:
            parsed = self._replica.environments.parse(text)
            calls = [{"name": name, "arguments": given} for name, given in parsed.calls]
            answer |= {"calls": calls, "content": parsed.content, "problem": parsed.error or ""}
            if drawn.stopped:
                for name, _ in parsed.calls:
                    sample.episode.count_call(name, failed=False)
                if parsed.error is not None:
                    sample.episode.count_call(UNREADABLE, failed=True)
        self._replica.answer(sample.number, Answer(question.number, answer))

    def _on_function_return(self, sample: OpenEpisode, outcome: Outcome) -> None:
        """Make a response of what a rollout function returned."""
        try:
            sample.asked.assemble(outcome.trajectories, sample)
        except FunctionError as error:
            self._fail(sample, f"the rollout function: {error}")
            return
        self._set_prompt(sample, sample.episode.prompt_ids or [])
        self._finish(sample)

    def _replay(self, sample: OpenEpisode, turns: list[list[int]], outcome: Outcome) -> None:
        """Give a new environment the next of the turns that were before it; then draw."""
        if outcome.kind == "reset":
            sample.messages = self._first_messages(sample, outcome)
        else:
            self._add_to_history(sample, turns.pop(0), outcome.messages)
        while turns:
            parsed = self._parsed(turns[0])
            if parsed.error is None:
                self._ask_environment(sample, parsed)
                return
            self._add_to_history(sample, turns.pop(0), [_unreadable(parsed.error)])

        sample.replays = None
        self._engine.submit(self._next_requests([sample]))

    def _add_to_history(
        self, sample: OpenEpisode, drawn: list[int], messages: Sequence[Message]
    ) -> None:
        """Keep a turn and what followed it, if the template may make a new context of them."""
        if self._limits.on_rewrite == "split":
            sample.history.append(Turn(drawn, True, self._replica.cut_all(messages)))

    def _ask_environment(self, sample: OpenEpisode, turn: ParsedTurn) -> None:
        """Let the environment answer a turn."""
        self._ask(sample, lambda host: host.turn(sample.number, turn.content, turn.calls))

    def _on_reset(self, sample: OpenEpisode, outcome: Outcome) -> None:
        """Add the first observation to the prompt, and draw if the others have theirs."""
        sample.messages = self._first_messages(sample, outcome)
        if outcome.observation is not None:
            try:
                prompt = sample.renderer.first(sample.messages)
            except DataError as error:
                self._fail(sample, f"its first observation is no prompt: {error}")
                return

            most = self._limits.max_prompt_tokens
            if len(prompt) > most:  # the models read what fails too, so it keeps the data's prompt
                self._fail(
                    sample,
                    f"the prompt has {len(prompt)} tokens with the first observation, more than "
                    f"data.max_prompt_length {most}",
                )
                return
            self._set_prompt(sample, prompt)
        self._submit_together(sample)

    def _set_prompt(self, sample: OpenEpisode, token_ids: list[int]) -> None:
        """Let a sample have another prompt than that of the data."""
        sample.prompt_ids = token_ids
        sample.episode.prompt_ids = token_ids
        sample.episode.prompt_text = self._replica.tokenizer.decode(
            token_ids, skip_special_tokens=False
        )

    def _first_messages(self, sample: OpenEpisode, outcome: Outcome) -> list[Message]:
        """The messages of the prompt, with the observation at the reset."""
        prompt = self._prompts.extra_info[sample.request.id.prompt]["prompt"]
        return as_messages(prompt) + outcome.messages

    def _submit_together(self, sample: OpenEpisode) -> None:
        """Draw the first turn of all samples of a request once all have their prompt."""
        request = sample.request
        beginning = self._beginning[request.id]
        beginning.discard(sample.row)
        if beginning:
            return
        del self._beginning[request.id]
        first_row = sample.row - sample.sample_index
        rows = [first_row + index for index in request.samples]
        alive = [self._open[row] for row in rows if row in self._open]

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

    def _context(self, sample: OpenEpisode) -> list[int]:
        begins = sample.episode.context_begins
        return sample.token_ids[begins[-1] :].tolist() if begins else super()._context(sample)

    def _goes_on(self, sample: OpenEpisode) -> bool:
        is_last = len(sample.episode.turns) + 1 >= self._limits.max_turns
        return super()._goes_on(sample) or not is_last

    def _seed(self, sample: OpenEpisode, seed: int) -> int:
        turn = len(sample.episode.turns)
        return mix_seed(seed, f"turn {turn}") if turn else seed

    def _parsed(self, tokens: Sequence[int]) -> ParsedTurn:
        return self._replica.environments.parse(
            self._replica.text_of(tokens, self._sampling.stop_token_ids)
        )

    def _on_turn(self, sample: OpenEpisode, stopped: bool) -> None:
        """Have the environment answer a turn."""
        sample.episode.turns.append(sample.length)
        if not stopped:
            self._ask_reward(sample)
            return
        parsed = self._parsed(sample.token_ids[sample.turn_begin :])
        if parsed.error is None:
            self._ask_environment(sample, parsed)
            return
        sample.episode.count_call(UNREADABLE, failed=True)
        if self._limits.on_parse_error == "end":
            self._ask_reward(sample)
        else:
            self._append_and_continue(sample, [_unreadable(parsed.error)])

    def _on_answer(self, sample: OpenEpisode, outcome: Outcome) -> None:
        """Go on after a turn that the environment has answered."""
        episode = sample.episode
        for result in outcome.results:
            episode.count_call(result.name, result.is_error)
        if outcome.turn_reward is not None:
            without = len(episode.turns) - 1 - len(episode.turn_rewards)
            episode.turn_rewards += [0.0] * without + [outcome.turn_reward]

        has_error = any(result.is_error for result in outcome.results)
        if outcome.ended or (has_error and self._limits.on_tool_error == "end"):
            sample.stopped = True
            self._ask_reward(sample)
        else:
            self._append_and_continue(sample, outcome.messages)

    def _append_and_continue(self, sample: OpenEpisode, messages: Sequence[Message]) -> None:
        """Append messages, and draw the next turn; without room or turns, end the episode."""
        episode = sample.episode
        if len(episode.turns) >= self._limits.max_turns:
            self._ask_reward(sample)
            return
        # A turn that messages follow was ended by an end token or a stop string.
        drawn = sample.token_ids[sample.turn_begin :].tolist()
        new_context = None
        try:
            tokens = sample.renderer.after(drawn, True, self._replica.cut_all(messages))
            self._add_to_history(sample, drawn, messages)
            if sample.history:
                new_context = sample.renderer.new_context(sample.messages, sample.history)
        except DataError as error:
            self._fail(sample, f"its answer cannot be written: {error}")
            return
        room = self._limits.room(episode, sample.length)
        if new_context is not None:
            tokens = new_context
            room = self._limits.max_length
        if len(tokens) >= room:
            self._ask_reward(sample)
            return

        if new_context is not None:
            episode.context_begins.append(sample.length)
            episode.context_prompts.append(len(tokens))
        sample.add_read(tokens)
        episode.turn_begins.append(sample.length)
        sample.turn_tokens = self._limits.turn_tokens(sample.episode)
        self._engine.submit(self._next_requests([sample]))

    def _ask_reward(self, sample: OpenEpisode) -> None:
        """Ask what the episode is worth, if its environment says so; otherwise it is over."""
        if sample.program.has_reward:
            self._ask(sample, lambda host: host.ask_reward(sample.number))
        else:
            self._finish(sample)

    def _fail(self, sample: OpenEpisode, reason: str) -> None:
        """End an episode that cannot go on; none of its tokens train."""
        if not sample.length:
            sample.episode.turn_begins = []
            sample.add_read([self._replica.tokenizer.eos_id])
        sample.exclude()
        sample.stopped = False
        sample.episode.failure = reason
        self._finish(sample)
        if sample.request.id in self._beginning:
            self._submit_together(sample)

    def _finish(self, sample: OpenEpisode) -> None:
        self._replica.end(sample.number)
        self._waiting.pop(sample.number, None)
        if sample.episode.context_begins or sample.program.is_function:
            sample.forget_record()  # it is of the last context alone
        self._end(sample, sample.stopped)

    def _set_aside(self, sample: OpenEpisode) -> None:
        super()._set_aside(sample)
        self._replica.waiting[sample.key] = sample

    def _abandon(self) -> None:
        for sample in self._open.values():
            self._replica.end(sample.number)


def _unreadable(error: str) -> Message:
    """The answer to a call that cannot be read."""
    return ToolResult(UNREADABLE, f"Error: {error}", is_error=True).message

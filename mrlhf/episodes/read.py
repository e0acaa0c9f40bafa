"""Reads what leads the episodes of a run, before any model is built: programs, templates, parser.

It knows the keys of episodes. It does not know how an episode is led.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mrlhf.batch import Prompts
from mrlhf.config.roots import PPOConfig
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.episodes.environments.host import EnvironmentHost, ToolLimits, describe
from mrlhf.episodes.environments.protocol import EnvironmentReference, Outcome, Program, as_messages
from mrlhf.episodes.template import Mismatch, Turn, TurnRenderer
from mrlhf.episodes.tool_calls import ParsedTurn, parser_for
from mrlhf.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_ALL = ""  # the name of the program of all rows that no other program is for


@dataclass(frozen=True)
class EnvironmentInputs:
    """The code that leads the episodes: a program for each data source, or one for all."""

    references: Mapping[str, EnvironmentReference]  # by the name of the program
    programs: Mapping[str, Program]
    renderers: Mapping[str, TurnRenderer]
    limits: ToolLimits
    parse: Callable[[str], ParsedTurn]

    def program_of(self, data_source: str) -> str:
        """The name of the program that leads the episodes of a data source."""
        return data_source if data_source in self.programs else _ALL

    def leads(self, data_source: str) -> bool:
        """Whether there is an environment for a data source, and not tools alone."""
        return not self.programs[self.program_of(data_source)].is_stateless

    def tools_of(self, data_source: str) -> Sequence[Mapping[str, Any]]:
        """The tools that the prompts of a data source show."""
        return self.programs[self.program_of(data_source)].tools


def read_environments(
    config: PPOConfig, tokenizer: Tokenizer, end_ids: Collection[int]
) -> EnvironmentInputs | None:
    """Load the programs of a run's episodes; None if a response is a single turn.

    `end_ids` are the tokens that end a turn.

    Raises:
        ConfigError, DataError, EnvironmentFault: one line.
    """
    rollout = config.rollout
    if not rollout.has_turns:
        return None

    tools = tuple(rollout.tools)
    references = {
        section.data_source or _ALL: EnvironmentReference(section.name, tools)
        for section in rollout.environment
    }
    references.setdefault(_ALL, EnvironmentReference(None, tools))

    limits = ToolLimits(
        timeout_s=rollout.tool_timeout_s,
        memory_mb=rollout.tool_memory_mb,
        workers=rollout.tool_workers,
    )
    programs = describe(references, limits)
    _check_reward(config, programs.values())
    _check_contexts(config, programs.values())
    renderers = {
        name: TurnRenderer(tokenizer, program.tools, end_ids) for name, program in programs.items()
    }

    splits = rollout.on_rewrite == "split"
    led = [name for name, program in programs.items() if not program.is_function]
    found = (_rewritten(renderers[name], tokenizer, programs[name], splits) for name in led)
    for mismatch in sorted({str(mismatch) for mismatch in found if mismatch is not None}):
        problem = f"the chat template writes a conversation otherwise than its turns: {mismatch}"
        if rollout.on_rewrite == "error":
            raise DataError(f"rollout.on_rewrite: {problem}")
        if rollout.on_rewrite == "keep":
            logger.warning("%s; the policy trains on its turns as it drew them", problem)
        else:
            logger.info("%s; there an episode goes on in another context", problem)

    return EnvironmentInputs(
        references=references,
        programs=programs,
        renderers=renderers,
        limits=limits,
        parse=_parser(config, programs.values(), tokenizer),
    )


def check_sources(config: PPOConfig, sources: Collection[str]) -> None:
    """ConfigError if an environment is for a data source that is none of the prompts' `sources`."""
    for section in config.rollout.environment:
        name = section.data_source
        if name is None or name in sources:
            continue
        near = difflib.get_close_matches(name, sources, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"rollout.environment: no prompt of the data has the data_source {name!r}; {hint}"
            f"there is {', '.join(map(repr, sorted(sources)))}"
        )


def draw_episodes(
    environments: EnvironmentInputs, tokenizer: Tokenizer, prompts: Prompts
) -> list[str]:
    """Try the first prompt of each program; the first of all is drawn, see `_draw_episode`."""
    programs = list(map(environments.program_of, prompts.data_source))
    firsts = sorted(map(programs.index, set(programs)))
    drawn = [_draw_episode(environments, tokenizer, prompts.select([first])) for first in firsts]
    return drawn[0]


def _draw_episode(
    environments: EnvironmentInputs, tokenizer: Tokenizer, prompt: Prompts
) -> list[str]:
    """The tokens of an episode of two turns as text, line by line, with those that train marked.

    What the policy says is left open, and so is what it is told. An environment is reset with the
    row. DataError if the chat template refuses what it says first.
    """
    program = environments.programs[environments.program_of(prompt.data_source[0])]
    if program.is_function:
        return ["  a rollout function leads the episodes; what it has drawn trains"]
    renderer = environments.renderers[program.name]
    prompt_ids = prompt.token_ids[0]
    lines = ["  an episode, as tokens; what the policy says trains"]
    if not program.is_stateless:
        begun = _reset(environments, program, prompt)
        if begun.failure is not None:
            lines.append(f"    reset fails here: {begun.failure}")
        elif begun.observation is not None:
            messages = as_messages(prompt.extra_info[0]["prompt"]) + as_messages(begun.observation)
            try:
                prompt_ids = renderer.first(messages)
            except DataError as error:
                raise DataError(
                    "rollout.environment: what reset returns is no message that may follow the "
                    f"prompt: {error}"
                ) from None

    said = [*tokenizer.encode("..."), tokenizer.eos_id]
    parts = [
        ("prompt", prompt_ids),
        ("trains", said),
        ("told", renderer.after(said, True, [_answer(program, "...")])),
        ("trains", said),
    ]
    for label, tokens in parts:
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        lines.append(f"    {label:<7} {len(tokens):>4} {text!r}")
    return lines


def _reset(environments: EnvironmentInputs, program: Program, prompt: Prompts) -> Outcome:
    """The outcome of beginning an episode with the prompt's row."""
    references = {program.name: environments.references[program.name]}
    with closing(EnvironmentHost(references, environments.limits)) as host:
        host.begin(0, program.name, prompt.row(0), seed=0)
        outcomes: list[Outcome] = []
        while not outcomes:
            outcomes = host.poll(timeout_s=1.0)
        return outcomes[0]


def _answer(program: Program, content: str) -> dict[str, str]:
    """Messages that may follow a turn: a tool's answer, or the user's if there are no tools."""
    if not program.tools:
        return {"role": "user", "content": content}
    return {"role": "tool", "name": program.tools[0]["function"]["name"], "content": content}


def _parser(
    config: PPOConfig, programs: Collection[Program], tokenizer: Tokenizer
) -> Callable[[str], ParsedTurn]:
    """The reader of a turn's calls: none without tools; a function is told if it cannot."""
    has_tools = any(program.tools for program in programs)
    if not has_tools and not any(program.is_function for program in programs):
        return lambda text: ParsedTurn(text, (), None)
    try:
        return parser_for(config.rollout.tool_parser, tokenizer.chat_template)
    except DataError as error:
        problem = f"rollout.tool_parser: {error}"
        if has_tools:
            raise DataError(problem) from None
        return lambda text: ParsedTurn(text, (), problem)


def _rewritten(
    renderer: TurnRenderer, tokenizer: Tokenizer, program: Program, splits: bool
) -> Mismatch | None:
    """Where the template writes a short conversation otherwise than its turns alone, if anywhere.

    Templates do so that drop thoughts of earlier turns, or write tools beside the last message.
    DataError if it `splits` there, and the template does not take it at once.
    """
    thinks = "</think>" in tokenizer.chat_template
    said = ["<think>\nWell.\n</think>\n\nSo." if thinks else "So.", "And so."]
    told = (_answer(program, "1"), {"role": "user", "content": "More."})
    turns = [
        Turn([*tokenizer.encode(text), tokenizer.eos_id], True, [message])
        for text, message in zip(said, told, strict=True)
    ]

    question = [{"role": "user", "content": "What?"}]
    if splits:
        try:
            renderer.new_context(question, turns)
        except DataError as error:
            raise DataError(
                f"rollout.on_rewrite: split renders a conversation at once, as text: {error}; set "
                "it to keep"
            ) from None
    try:
        return renderer.check(question, turns)
    except DataError as error:  # the prompts of the data may be such that it takes them
        logger.debug("the chat template refuses a conversation: %s", error)
        return None


def _check_reward(config: PPOConfig, programs: Collection[Program]) -> None:
    """Compare the terms of the reward with what the environments say."""
    is_asked = any(term.name == "environment" for term in config.reward.terms)
    says = any(program.has_reward for program in programs)
    may_say = any(program.is_function for program in programs)

    if is_asked and not says and not may_say:
        raise ConfigError(
            "reward.terms holds 'environment', but rollout.environment has no method reward(self); "
            "add one, or use another term"
        )
    if says and not is_asked:
        logger.warning(
            "rollout.environment has a method reward, which no term of the reward uses; add "
            "{name: environment} to reward.terms"
        )
    if may_say and not is_asked:
        logger.warning(
            "a reward that trajectories of a rollout function share does not count, as no term of "
            "the reward uses it; if there are any, add {name: environment} to reward.terms"
        )


def _check_contexts(config: PPOConfig, programs: Collection[Program]) -> None:
    """Refuse what needs that an episode has one context, if it may have several."""
    has_function = any(program.is_function for program in programs)
    rollout = config.rollout
    if has_function and rollout.partial.is_on:
        raise ConfigError(
            "a rollout function draws its episode with one version of the policy; set "
            "rollout.partial.over to 1"
        )

    if not has_function and rollout.on_rewrite != "split":
        return
    user = "a rollout function" if has_function else "rollout.on_rewrite: split"
    for key, is_set, remedy in (
        ("actor.router_replay", config.actor.router_replay != "none", "none"),
        ("algorithm.overlong_buffer.enable", config.algorithm.overlong_buffer.enable, "false"),
    ):
        if is_set:
            raise ConfigError(
                f"{user} may give an episode several contexts, and {key} needs a single one; set "
                f"it to {remedy}"
            )

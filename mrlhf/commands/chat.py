"""Talks to a policy in the terminal.

Usage: mrlhf chat RUN [--beside START] [--temperature T] ... [--prompt TEXT]
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

from mrlhf.commands.endings import end_command
from mrlhf.episodes.talk import Talk
from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.inference.base import SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.inputs.paths import require_paths
from mrlhf.inputs.read import read_engine_inputs
from mrlhf.log import quiet_transformers
from mrlhf.models.families import load_spec
from mrlhf.parallel.job import launch_alone, processes_on_this_machine
from mrlhf.preflight import check_policy
from mrlhf.printable import show
from mrlhf.run.startup import start_without_directory
from mrlhf.trainers.policy import open_policy, policy_config
from mrlhf.version import add_version_option

_ENGINE = ("rollout.max_num_seqs=1", "rollout.max_prefill_tokens=512")  # ^C waits for a pass
_LONGEST = 16384  # tokens of a conversation, which the cache of a large model still holds
_HELP = """\
/help           this text, and how answers are drawn
/new            begin another conversation
/system TEXT    begin another one with this system message; without TEXT, with none
/set KEY VALUE  change one of the keys below
/quit           leave, as ^D does; ^C ends an answer, and leaves if it is pressed again"""
# Each key as an option, its field of `SamplingParams`, type and default, and what it is.
KEYS = (
    ("--temperature", "temperature", float, 1.0, "0 takes the likeliest token"),
    ("--top-p", "top_p", float, 1.0, "draw from the fewest tokens of this probability; 1 is off"),
    ("--top-k", "top_k", int, -1, "draw from so many likeliest tokens; -1 is off"),
    ("--max-response-length", "max_tokens", int, 512, "most tokens of an answer"),
    ("--seed", "seed", int, 1, "of the random numbers; each answer of a session has others"),
)
_NAMES = [option[2:] for option, *_ in KEYS]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Talk to a policy in the terminal: that of a run, a model or an adapter."
    )
    add_version_option(parser)

    add = parser.add_argument
    add("policy", metavar="RUN", help="output directory of a run, checkpoint, model or adapter")
    add("--beside", metavar="START", help="another one, which answers each message as well")
    add("--prompt", metavar="TEXT", help="print the answer to this message, and end")
    for option, field, kind, default, meaning in KEYS:
        help_text = f"{meaning} (default: {default})"
        add(option, dest=field, type=kind, default=default, metavar="N", help=help_text)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Talk; 0 at the end, 2 on bad input, 130 if the answer to --prompt is interrupted."""
    options = parse(arguments)
    quiet_transformers()
    return end_command(lambda: _chat(options), options.policy)


def _chat(options: argparse.Namespace) -> int:
    if processes_on_this_machine() > 1:
        raise ConfigError("chat is one process, whatever layout trained; start it without torchrun")
    if options.prompt is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "standard input and output are no terminal; --prompt TEXT prints the answer to one "
            "message, and mrlhf generate those to a file of prompts"
        )

    fields: dict[str, Any] = {field: getattr(options, field) for _, field, *_ in KEYS}
    sampling = SamplingParams(**fields)
    names = [options.policy, *([options.beside] if options.beside else [])]
    session = _Session(dict(zip(names, _open(names), strict=True)), sampling)
    if options.prompt is None:
        session.run()
        return 0
    return 130 if session.ask(options.prompt) else 0


def _open(paths: Sequence[str]) -> list[Talk]:
    """Bring the weights of each policy into an engine; all are checked before one is built."""
    configs = []
    for path in paths:
        config = policy_config(path, None, _ENGINE)
        require_paths(config)
        longest = min(_LONGEST, load_spec(config.actor.path, "lm").max_positions)
        lengths = {"max_prompt_length": longest - 1, "max_response_length": 1}
        config = config.model_copy(update={"data": config.data.model_copy(update=lengths)})
        check_policy(config, world_size=1)
        configs.append(config)

    launch_alone()
    run = start_without_directory(configs[0])
    talks = []
    for config in configs:
        inputs = read_engine_inputs(config)
        generator = open_policy(config, run, inputs).generator
        generator.take_weights(1)
        assert isinstance(generator.engine, NativeEngine), "the configuration names it"
        ends = inputs.endings.token_ids
        talks.append(Talk(generator.engine, inputs.tokenizer, ends, config.data.max_length))
    return talks


class _Session:
    """Policies that answer the same messages, by their names."""

    def __init__(self, talks: dict[str, Talk], sampling: SamplingParams) -> None:
        self._talks = talks
        self._sampling = sampling
        self._system = ""
        self._number = 0  # of the next answer

    def run(self) -> None:
        """Answer what is typed until the user leaves."""
        with suppress(ImportError):  # keys that edit a line, and bring back those typed before
            import readline  # noqa: F401
        for name, talk in self._talks.items():
            goes_on = "no chat template: it continues your text; after one that it ended, a new one"
            show(f"{name}: {'chats' if talk.renderer else goes_on}")
        show("/help lists what can be changed; ^D leaves")

        interrupts = 0
        while interrupts < 2:
            try:
                line = input("> ")
                interrupts = 0
                if line.rstrip() == "/quit":
                    return
                if line.startswith("/"):
                    self._command(*line.partition(" ")[::2])
                elif line.strip():
                    interrupts = int(self.ask(line))
            except EOFError:
                return show("")
            except KeyboardInterrupt:
                interrupts += 1
                show("\n^C again or ^D leaves" if interrupts == 1 else "")
            except MrlhfError as error:
                show(f"error: {error}")

    def ask(self, message: str) -> bool:
        """Show the answer of each policy; returns whether ^C ended one."""
        was_interrupted = False
        for name, talk in self._talks.items():
            if len(self._talks) > 1:
                show(f"[{name}]")
            interrupt = Event()  # an error amid a pass through the model would empty the cache
            before = signal.signal(signal.SIGINT, lambda *_, event=interrupt: event.set())
            try:
                talk.answer(message, self._sampling, self._number, partial(_tell, interrupt))
            finally:
                signal.signal(signal.SIGINT, before)
            show("")

            was_interrupted |= interrupt.is_set()
            if not (talk.stopped or interrupt.is_set()):
                sys.stderr.write(f"[cut after {len(talk.last or ())} tokens]\n")
        self._number += 1
        return was_interrupted

    def _command(self, command: str, rest: str) -> None:
        """Do what a line that begins with a slash says."""
        if command == "/set":
            self._set(*rest.strip().partition(" ")[::2])
        elif command == "/system" or (command == "/new" and not rest):
            self._system = rest.strip() if command == "/system" else self._system
            for talk in self._talks.values():
                talk.begin(self._system)
        elif command == "/help":
            show(_HELP)
            for name, (_, field, *_, meaning) in zip(_NAMES, KEYS, strict=True):
                show(f"  {name:<20} {getattr(self._sampling, field):<6} {meaning}")
        else:
            raise ConfigError(f"there is no command {command!r}; /help lists them")

    def _set(self, key: str, value: str) -> None:
        key = key.replace("_", "-")
        if key not in _NAMES:
            raise ConfigError(f"/set takes one of {', '.join(_NAMES)}, not {key!r}")
        _, field, kind, *_ = KEYS[_NAMES.index(key)]
        try:
            changed: dict[str, Any] = {field: kind(value)}
        except ValueError:
            raise ConfigError(f"/set {key} takes a number, not {value!r}") from None
        self._sampling = replace(self._sampling, **changed)
        self._number = 0 if field == "seed" else self._number


def _tell(interrupt: Event, text: str) -> bool:
    """Show a part of an answer; returns whether the answer goes on."""
    show(text, end="")
    return not interrupt.is_set()

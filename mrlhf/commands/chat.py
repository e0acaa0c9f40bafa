"""Talks to a policy in the terminal.

Usage: mrlhf chat RUN [--beside START] [--temperature T] ... [--prompt TEXT]
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import Event

from mrlhf.commands.endings import end_command
from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.inference.base import SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.log import quiet_transformers
from mrlhf.models.families import load_spec
from mrlhf.parallel.job import launch_alone, processes_on_this_machine
from mrlhf.preflight.inputs import read_engine_inputs
from mrlhf.printable import show
from mrlhf.rollout.talk import Talk
from mrlhf.run.startup import start_without_directory
from mrlhf.trainers.policy import check_policy, open_policy, policy_config
from mrlhf.version import add_version_option

_INTERRUPTED = 130
_ENGINE = ("rollout.max_num_seqs=1", "rollout.max_prefill_tokens=512")  # ^C waits for a pass
_LONGEST = 16384  # tokens of a conversation, which the cache of a large model still holds
_HELP = """\
/help           this text, and how answers are drawn
/new            begin another conversation
/system TEXT    begin another one with this system message; without TEXT, with none
/set KEY VALUE  change one of the keys below
/quit           leave, as ^D does; ^C ends an answer, and leaves if it is pressed again"""
_CONTINUES = (
    "no chat template, so it continues your text; the text after one that it ended is a new one"
)
# Each key: the field of `SamplingParams`, its type, its default, and what it is.
KEYS = {
    "temperature": ("temperature", float, 1.0, "0 takes the likeliest token"),
    "top-p": ("top_p", float, 1.0, "draw from the fewest tokens of this probability; 1 is off"),
    "top-k": ("top_k", int, -1, "draw from so many likeliest tokens; -1 is off"),
    "max-response-length": ("max_tokens", int, 512, "most tokens of an answer"),
    "seed": ("seed", int, 1, "of the random numbers; each answer of a session has others"),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Talk to a policy in the terminal: a run's newest weights, a model, or an "
        "adapter. Without a chat template it continues your text. /help lists what can be "
        "changed meanwhile."
    )
    add_version_option(parser)
    add = parser.add_argument
    add("policy", metavar="RUN", help="output directory of a run, a model, or an adapter")
    add("--beside", metavar="START", help="another one, which answers each message as well")
    add("--system", metavar="TEXT", help="a system message", default="")
    add("--prompt", metavar="TEXT", help="print the answer to this message, and end")
    for key, (field, kind, default, meaning) in KEYS.items():
        add(
            f"--{key}",
            dest=field,
            type=kind,
            default=default,
            metavar=key[0].upper(),
            help=f"{meaning} (default: {default})",
        )
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
    fields = {field: getattr(options, field) for field, *_ in KEYS.values()}
    sampling = SamplingParams(**fields)
    paths = [options.policy, *([options.beside] if options.beside else [])]
    talks = list(zip(paths, _open(paths), strict=True))
    session = _Session(talks, sampling, options.prompt is None)
    session.begin(options.system)
    if options.prompt is not None:
        return _INTERRUPTED if session.ask(options.prompt) else 0
    return session.run()


def _open(paths: Sequence[str]) -> list[Talk]:
    """Bring the weights of each policy into an engine; all are checked before one is built."""
    configs = []
    for path in paths:
        config = policy_config(path, None, _ENGINE)
        check_policy(config, world_size=1)
        longest = min(_LONGEST, load_spec(config.actor.path, "lm").max_positions)
        lengths = {"max_prompt_length": longest - 1, "max_response_length": 1}
        configs.append(config.model_copy(update={"data": config.data.model_copy(update=lengths)}))

    launch_alone()
    run = start_without_directory(configs[0])
    talks = []
    for config in configs:
        inputs = read_engine_inputs(config)
        generator = open_policy(config, run, inputs).generator
        generator.take_weights(1)
        assert isinstance(generator.engine, NativeEngine), "the engine of the configuration"
        ends = inputs.endings.token_ids
        talks.append(Talk(generator.engine, inputs.tokenizer, ends, config.data.max_length))
    return talks


class _Session:
    """One or two policies that answer the same messages."""

    def __init__(
        self, talks: Sequence[tuple[str, Talk]], sampling: SamplingParams, is_interactive: bool
    ) -> None:
        self._talks = talks  # with their names
        self._sampling = sampling
        self._is_interactive = is_interactive
        self._number = 0  # of the next answer

    def run(self) -> int:
        """Answer what is typed until the user leaves."""
        with suppress(ImportError):  # keys that edit a line, and bring back those typed before
            import readline  # noqa: F401
        for name, talk in self._talks:
            show(f"{name}: {'chats' if talk.has_template else _CONTINUES}")
        show("/help lists what can be changed; ^D leaves")

        interrupts = 0
        while interrupts < 2:
            try:
                line = input("> ")
                interrupts = 0
                if line.strip() == "/quit":
                    return 0
                if line.startswith("/"):
                    self._command(line)
                elif line.strip():
                    interrupts = int(self.ask(line))
            except EOFError:
                break
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts == 1:
                    show("\n^C again or ^D leaves")
            except MrlhfError as error:
                show(f"error: {error}")
        show("")
        return 0

    def ask(self, message: str) -> bool:
        """Show the answer of each policy; returns whether ^C ended one."""
        was_interrupted = False
        for name, talk in self._talks:
            if len(self._talks) > 1:
                show(f"[{name}]")
            with _interrupt() as interrupt:
                answer = talk.answer(
                    message, self._sampling, self._number, partial(show, end=""), interrupt.is_set
                )
            show("")
            if not (answer.stopped or interrupt.is_set()) and self._is_interactive:
                show(f"[cut after {len(answer.token_ids)} tokens]")
            was_interrupted |= interrupt.is_set()
        self._number += 1
        return was_interrupted

    def _command(self, line: str) -> None:
        """Do what a line that begins with a slash says."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if command == "/set":
            key, _, value = rest.partition(" ")
            self._set(key, value.strip())
        elif command == "/system":
            self.begin(rest)
        elif command == "/new" and not rest:
            self.begin(None)
        elif command == "/help":
            values = {key: getattr(self._sampling, field) for key, (field, *_) in KEYS.items()}
            width = max(map(len, KEYS))
            rows = (f"  {key:<{width}}  {values[key]:<6} {KEYS[key][-1]}" for key in KEYS)
            show("\n".join([_HELP, *rows]))
        else:
            raise ConfigError(f"there is no command {line!r}; /help lists them")

    def begin(self, system: str | None) -> None:
        """Begin another conversation; None keeps the system message."""
        for _, talk in self._talks:
            talk.check_system(system or "")
        for _, talk in self._talks:
            talk.begin(system)

    def _set(self, key: str, value: str) -> None:
        key = key.replace("_", "-")
        if key not in KEYS:
            raise ConfigError(f"/set takes one of {', '.join(KEYS)}, not {key!r}")
        field, kind, *_ = KEYS[key]
        try:
            number = kind(value)
        except ValueError:
            raise ConfigError(f"/set {key} takes a number, not {value!r}") from None
        self._sampling = replace(self._sampling, **{field: number})
        if field == "seed":
            self._number = 0


@contextmanager
def _interrupt() -> Iterator[Event]:
    """Whether ^C was pressed; an error amid a pass through the model would empty the cache."""
    pressed = Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)

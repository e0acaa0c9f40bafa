"""The command line of the five launchers: --config, key.path=value, --quiet, --dry-run, --help,
--version.

It turns arguments into a configuration, and starts nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from mrlhf.config.load import read_config
from mrlhf.config.roots import AnyConfig, Root
from mrlhf.config.schema import help_text
from mrlhf.errors import ConfigError
from mrlhf.printable import show
from mrlhf.version import add_version_option

ConfigT = TypeVar("ConfigT", bound=AnyConfig)


@dataclass(frozen=True)
class DryRun:
    """The request to check and describe a run without starting it."""

    world_size: int | None  # ranks to check for; None: the fewest on which the layouts fit
    allow_missing: bool = False  # succeed although files or packages are not on this machine


Arguments = tuple[ConfigT, DryRun | None, str]
"""What `parse_args` returns."""


class _Help(argparse.Action):
    """Prints the help with `show`, which reports an error at once, unlike argparse's own action."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        show(parser.format_help().rstrip())
        parser.exit()


def parse_args(root_class: type[ConfigT], argv: Sequence[str]) -> Arguments[ConfigT]:
    """Read a launcher's arguments (without the program's name).

    Returns:
        The configuration; the dry run if one was asked for; and a line that names the keys that
        were left out since they have no effect, or "".

    Raises:
        ConfigError: bad configuration, one line for each mistake.
        SystemExit: --help, --version, or an option that does not exist.
    """
    arguments = _parser(root_class).parse_intermixed_args(argv)
    overrides: list[str] = arguments.overrides
    if arguments.quiet:
        overrides = [*overrides, "trainer.console=quiet"]
    config, left_out = read_config(root_class, arguments.config, overrides)
    if arguments.dry_run:
        return config, DryRun(arguments.world_size, arguments.allow_missing), left_out
    if arguments.world_size is not None:
        raise ConfigError(
            "--world-size goes with --dry-run only; torchrun decides how many ranks run"
        )
    if arguments.allow_missing:
        raise ConfigError("--allow-missing goes with --dry-run only; a run needs all that it names")
    return config, None, left_out


def _parser(root_class: type[Root]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--config FILE] ... [key.path=value ...] [--quiet] "
        "[--dry-run [--world-size N] [--allow-missing]]",
        epilog=f"keys = defaults (values) meaning:\n{help_text(root_class)}".replace("%", "%%"),
        allow_abbrev=False,
        add_help=False,
    )

    add_version_option(parser)
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this text and stop")
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="YAML file; may be given again: later ones override",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="show warnings, alarms and errors alone (trainer.console=quiet)",
    )

    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the batch arithmetic, stop"
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks to check for (default: the fewest that fit)",
    )
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="let a dry run end with 0, not 3, if files or packages are not on this machine",
    )

    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="set a key; the value is YAML"
    )
    return parser

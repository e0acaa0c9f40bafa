"""Turns the configuration of verl, TRL or OpenRLHF into ours, and says what is different.

Usage: mrlhf import-config SCRIPT_OR_YAML [--out my.yaml] [--world-size N]
                           [--from verl|trl|openrlhf] [--program ppo|sft|dpo|rm]
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from mrlhf.commands.endings import end_command
from mrlhf.config.imports.source import Source, read_source
from mrlhf.config.imports.translate import Imported, as_yaml, leave_out, translate
from mrlhf.config.load import read_config
from mrlhf.config.roots import PROGRAMS
from mrlhf.config.unread import unread_keys
from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.log import quiet_transformers
from mrlhf.preflight import dry_run
from mrlhf.printable import show
from mrlhf.version import add_version_option


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Read a shell script with the command line of verl, TRL or OpenRLHF, or their "
        "YAML, and write a configuration of mrlhf. Nothing of the script is run."
    )
    add_version_option(parser)
    add = parser.add_argument
    add("source", type=Path, metavar="FILE", help="a script, or YAML")
    add("--out", type=Path, metavar="FILE", help="where the YAML goes (default: it is printed)")
    add("--world-size", type=int, metavar="N", help="ranks of the run (default: as there, or 8)")
    add("--from", dest="system", choices=["verl", "trl", "openrlhf"], help="default: found out")
    programs = [program for program in PROGRAMS if program != "critic"]  # none of them has it
    add("--program", choices=programs, help="default: found out")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Translate and tell; 0 when done, 1 if the result does not run as it is, 2 on bad input."""
    options = parse(arguments)

    def translate_it() -> int:
        quiet_transformers()
        source = read_source(options.source, options.system, options.program)
        if options.world_size is not None and options.world_size < 1:
            raise ConfigError("--world-size should be at least 1")

        world_size = options.world_size or source.world_size or 8
        result = translate(source, world_size)
        verdict, runs = _verdict(result, source, world_size)
        text = as_yaml(result, source.system)
        if options.out is None:
            show(text)
        else:
            if options.out.exists():
                raise ConfigError(f"{options.out} exists; give another --out")
            options.out.write_text(text, encoding="utf-8")
            show(f"wrote {options.out}: {source.program} from {source.system}")
            show("".join(f"# first: {note}\n" for note in result.notes))

        remarks = "\n".join([*_missing(result), verdict])
        # What is printed is YAML as a whole.
        show(remarks if options.out else textwrap.indent(remarks, "# "))
        return 0 if runs else 1

    return end_command(translate_it, options.out or options.source)


def _missing(result: Imported) -> list[str]:
    if not result.missing:
        return ["every key has a counterpart"]
    by_reason: dict[str, list[str]] = {}
    for key, reason in sorted(result.missing.items()):
        by_reason.setdefault(reason, []).append(key)
    lines = ["not taken over:"]
    for reason, keys in by_reason.items():
        lines += [f"  {reason}:", f"    {', '.join(keys)}"]
    return lines


def _verdict(result: Imported, source: Source, world_size: int) -> tuple[str, bool]:
    """What a dry run says of the configuration, without keys that have no effect in it, and whether
    it runs.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "imported.yaml"
        try:
            while True:
                file.write_text(as_yaml(result, source.system), encoding="utf-8")
                config, _ = read_config(PROGRAMS[source.program], [str(file)], [])
                strays = [stray.key for stray in unread_keys(config) if stray.key in result.values]
                if not strays:
                    break
                leave_out(result, strays[0])
            found = dry_run(config, world_size)
        except MrlhfError as error:
            said = str(error).replace(f"{file}: ", "")
            return f"it does not run on {world_size} ranks as it is:\n{said}", False

    lines = [f"not on this machine: {line}" for line in found.missing]
    return "\n".join([*lines, f"a dry run says: {found.text.splitlines()[-1]}"]), True

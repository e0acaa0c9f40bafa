"""Prints the script that lets a shell complete the commands, the options and the keys of mrlhf.

Usage: source <(mrlhf completion bash)
       source <(mrlhf completion zsh)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mrlhf.commands.entry import SUBCOMMANDS
from mrlhf.config.roots import PROGRAMS, Root
from mrlhf.config.tree import nodes
from mrlhf.printable import show
from mrlhf.version import add_version_option

_OPTIONS = "-n --config --dry-run --world-size --allow-missing --quiet --help"
# A key ends with "=", after which the value follows at once, so no blank is added behind it.
_SCRIPT = """\
_mrlhf() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words=
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{names} --help --version"
  else
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  case ${{COMPREPLY[0]}} in *=) compopt -o nospace 2>/dev/null ;; esac
}}
complete -o default -F _mrlhf mrlhf"""
_ZSH = "autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print; 0 when done."""
    parser = argparse.ArgumentParser(
        description="Print a script for your shell: source <(mrlhf completion bash)"
    )
    add_version_option(parser)
    parser.add_argument("shell", choices=["bash", "zsh"])
    shell: str = parser.parse_args(arguments).shell
    show(script() if shell == "bash" else _ZSH + script())
    return 0


def script() -> str:
    """Return bash's script, which zsh runs too."""
    cases = [
        f'      train-{name}) words="{_OPTIONS} {" ".join(_keys(root))}" ;;'
        for name, root in PROGRAMS.items()
    ]
    names = " ".join(subcommand.name for subcommand in SUBCOMMANDS)
    return _SCRIPT.format(names=names, cases="\n".join(cases))


def _keys(root: type[Root]) -> list[str]:
    return [f"{name}=" for name, node in nodes(root).items() if not node.is_section]

"""Prints the script that lets a shell complete commands, options, keys of mrlhf and their values.

Options are read in the sources of the commands, most of which would import torch.

Usage: source <(mrlhf completion bash)
       source <(mrlhf completion zsh)
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from mrlhf.commands.docs import read_pages
from mrlhf.commands.entry import SUBCOMMANDS, Subcommand
from mrlhf.config.roots import PROGRAMS, PPOConfig
from mrlhf.config.tree import nodes
from mrlhf.printable import show
from mrlhf.version import add_version_option, shipped

# An option, or the name of a parser of its own.
_OPTION = re.compile(r'(?:\(\s*(?:"-h", )?"(?=--)|add_parser\(\s*")([\w-]+)"')
# bash takes "=" for a word of its own, zsh does not. A key ends with "=", after which the value
# follows at once, so no blank is added behind it.
_SCRIPT = """\
_mrlhf() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} last=${{COMP_WORDS[COMP_CWORD-1]}}
  local key= lead= words= command= each
  for each in "${{COMP_WORDS[@]:0:$COMP_CWORD}}"; do
    each=${{each##*/}} each=${{each%.py}} each=${{each#mrlhf-}} each=${{each//_/-}}
    each=${{each%-checkpoint}}
    case $each in torchrun) ;; {commands}) command=$each; break ;; esac
  done
  case $word in
    =) key=$last word= ;;
    [!-]*=*) key=${{word%%=*}} lead=$key= ;;
    *) [ "$last" != = ] || key=${{COMP_WORDS[COMP_CWORD-2]}} ;;
  esac
  if [ -n "$key" ]; then
    case $key in {values}
    esac
    words=$(for each in $words; do echo "$lead$each"; done)
  elif [ -n "$command" ]; then
    case $command in {options}
    esac
    words="$words --help --version"
  elif [ "${{COMP_WORDS[0]##*/}}" = mrlhf ]; then
    words="{names} --help --version"
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  case ${{COMPREPLY[0]}} in *=) compopt -o nospace 2>/dev/null ;; esac
}}
complete -o default -F _mrlhf mrlhf torchrun {programs} mrlhf-convert-checkpoint"""
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
    names = [row.name for row in SUBCOMMANDS]
    keys = {name: node for root in PROGRAMS.values() for name, node in nodes(root).items()}
    values = {name: " ".join(_values(node.field.annotation)) for name, node in keys.items()}
    return _SCRIPT.format(
        names=" ".join(names),
        commands=" | ".join(names),
        programs=" ".join(f"mrlhf-{name}" for name in names),
        values="\n".join(f'{key}) words="{words}" ;;' for key, words in values.items() if words),
        options="\n".join(f'{row.name}) words="{_words(row)}" ;;' for row in SUBCOMMANDS),
    )


def _words(row: Subcommand) -> str:
    """What may follow the name of a command."""
    roots = {f"train-{name}": root for name, root in PROGRAMS.items()}
    spec = find_spec("mrlhf.config.arguments" if row.name in roots else row.module)
    assert spec is not None and spec.origin is not None
    words = _OPTION.findall(Path(spec.origin).read_text(encoding="utf-8"))

    root = roots.get(row.name, PPOConfig if row.name in ("plan", "doctor") else None)
    if root is not None:
        words += [f"{name}=" for name, node in nodes(root).items() if not node.is_section]
    if row.name == "docs":
        words += read_pages(shipped())
    return " ".join(words)


def _values(annotation: Any) -> list[str]:
    """The words that a key of this type takes, if it takes any."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return list(map(str, get_args(annotation)))
    parts = () if get_origin(annotation) is list else get_args(annotation)
    return [word for part in parts for word in _values(part)]

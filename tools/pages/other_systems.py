"""The pages for people who come from another system, written from the tables of names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import fill
from typing import Any

from mrlhf.config.imports.source import System, read_table
from mrlhf.config.verl_names import Name, longest_end, read_names

_TITLES: dict[System, str] = {"trl": "TRL", "openrlhf": "OpenRLHF"}
_VERL = """\
# Coming from verl

```
python tools/import_config.py SCRIPT.sh --out my.yaml --world-size 8
```

reads a script with verl's command line, or its YAML, and writes ours. A comment stands where more
than the name changed; what has no counterpart is listed with the reason, and a dry run says
whether the result fits that many ranks. Without `--world-size` these are the ranks that the script
names. The exit code is 0 if it fits, 1 if it does not run as it is, and 2 if the file cannot be
read. slime and NeMo-RL are not read.

Nothing of the script is run. Variables, arrays, arithmetic, conditions, loops, functions and
commands inside of `bash -c` are worked out, with variables from outside unset and without
arguments. A value that only a run could tell, such as `$(date)`, is left out and listed. A file
with several runs is refused. What changes the run most, such as tools that are lost or a file of
keys that was not read, stands first, as `# first: ...`.

`algorithm`, `critic` and most words of the roles have verl's names, and mean the same: they are not
listed below. Without FSDP, weights are split by `tp` and `pp`; the import takes the engine's `tp`.
Micro-batches count tokens: with `use_dynamic_bsz` those of `ppo_max_token_len_per_gpu`, else the
samples at full length. What verl means where nothing is said (`seed: 42`,
`rollout.max_num_seqs: 1024`, gradient checkpointing, the schedule of SFT, sequence parallelism
with `tp`) is written out. Models are local directories, and rewards have names
([data_and_rewards.md](data_and_rewards.md)): `reward.terms` must be looked at by hand.

This page is written by `python tools/write_configuration_page.py` from the tables that the import
reads.
"""
_OTHERS = """\
# Coming from TRL or OpenRLHF

`tools/import_config.py` reads a script with the command line of TRL or OpenRLHF, or a YAML of such
arguments, and writes ours; [coming_from_verl.md](coming_from_verl.md) has the command. TRL's batch
sizes are completions of a device, so give the ranks that you had as `--world-size`, unless the
script's launcher names them. What they mean where nothing is said is written out. SFT, DPO, reward
models, GRPO (GSPO, CISPO and SAPO too), RLOO and PPO are read; KTO, ORPO, online DPO and other
trainers are refused, and `--program` overrules that. TRL's RLOO weighs whole sequences by their
ratio; here tokens are. A reward function has another signature here: `f(data_source, solution_str,
ground_truth, extra_info)` scores one response.

`{role}` is `actor` in PPO and GRPO, else `model`; `{optim}` is its optimizer. This page is
written by `python tools/write_configuration_page.py` from the tables that the import reads.
"""


def verl_page() -> str:
    """Return `docs/coming_from_verl.md`."""
    names = read_names()
    lines = [_VERL, "## Sections", "", "| verl | here |", "|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` |" for theirs, ours in names.sections.items()]
    lines += ["", "## Keys below a role", "", "| verl | here | changes |", "|---|---|---|"]
    lines += _verl_rows(names.below_a_role)
    lines += ["", "## Other keys", "", "| verl | here | changes |", "|---|---|---|"]
    lines += _verl_rows(names.elsewhere)
    lines += ["", "## Without a counterpart", "", *_missing(names.missing)]
    lines += ["", "Below a role:", "", *_missing(names.missing_below_a_role)]
    return "\n".join(lines) + "\n"


def others_page() -> str:
    """Return `docs/coming_from_trl.md`."""
    lines = [_OTHERS]
    for system, title in _TITLES.items():
        table = read_table(system)
        names = {theirs: _name(row) for theirs, row in table["names"].items()}
        by_program: dict[str, list[str]] = {}
        for program, rows in table["by_program"].items():
            for theirs, row in rows.items():
                by_program.setdefault(theirs, []).append(f"{_name(row)}` ({program})")
        several = {theirs: ", `".join(ours)[:-1] for theirs, ours in by_program.items()}
        lines += [f"## {title}", "", f"| {title} | here | changes |", "|---|---|---|"]
        lines += _rows(names, table["changes"])
        lines += [
            f"| `{theirs}` | `{ours}) | {table['changes'].get(theirs, '')} |"
            for theirs, ours in several.items()
        ]
        lines += ["", f"Without a counterpart in {title}'s list:", "", *_missing(table["missing"])]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _verl_rows(names: Mapping[str, Name]) -> Iterator[str]:
    """The rows of keys that are not named alike, and not as the section around them."""
    for theirs, row in names.items():
        ours = (row.ours or "").split(" | ")[0]
        around = names.get(theirs.rpartition(".")[0])
        if ours != theirs and (around is None or around.ours != row.ours or row.change):
            yield f"| `{theirs}` | `{ours}` | {row.change} |"


def _name(row: Any) -> str:
    return str(row[0] if isinstance(row, list) else row)


def _rows(names: Mapping[str, str], changes: Mapping[str, str]) -> Iterator[str]:
    for theirs, ours in names.items():
        yield f"| `{theirs}` | `{ours}` | {longest_end(changes, theirs) or ''} |"


def _missing(reasons: Mapping[str, str]) -> list[str]:
    """The keys without counterpart by their reasons; those without a reason last."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        by_reason.setdefault(reason, []).append(f"`{key}`")
    without = by_reason.pop("", [])
    if without:
        by_reason["there is no such thing here"] = without
    lines = [f"- {reason}: {', '.join(keys)}" for reason, keys in by_reason.items()]
    return [fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) for line in lines]

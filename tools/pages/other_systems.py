"""The pages for people who come from another system, written from the tables of names."""

from __future__ import annotations

from collections.abc import Mapping
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
whether the result fits that many ranks (without `--world-size` those that the script names). The
exit code is 0 if it fits, 1 if it does not run as it is, and 2 if the file cannot be read. slime
and NeMo-RL are not read.

Nothing of the script is run. Variables, arrays, arithmetic, conditions, loops, functions and
commands inside of `bash -c` are worked out, with variables from outside unset. A value that only a
run could tell, such as `$(date)`, is left out and listed. A file with several runs is refused. What
changes the run most, such as tools that are lost, stands first, as `# first: ...`.

`algorithm`, `critic` and most words of the roles have verl's names, and mean the same: they are not
listed below. Without FSDP, weights are split by `tp` and `pp`; the import takes the engine's `tp`.
With `use_dynamic_bsz` micro-batches have the tokens of `ppo_max_token_len_per_gpu`, else those of
the samples at full length. What verl means where nothing is said (`seed: 42`,
`rollout.max_num_seqs: 1024`, gradient checkpointing, the schedule of SFT, sequence parallelism
with `tp`) is written out. Rewards have names ([data_and_rewards.md](data_and_rewards.md)):
`reward.terms` must be looked at by hand.

`python tools/write_configuration_page.py` writes this page from the tables that the import reads.
"""
_OTHERS = """\
# Coming from TRL or OpenRLHF

[The command](coming_from_verl.md) is that for verl. TRL's batch sizes are completions of a device,
so give the ranks that you had as `--world-size`, unless the script's launcher names them. SFT, DPO,
reward models, GRPO (GSPO, CISPO and SAPO too), RLOO, PPO, distillation and GKD are read; KTO, ORPO,
online DPO and other trainers are refused, and `--program` overrules that. TRL's RLOO weighs whole
sequences by their ratio; here tokens are. Its reward models take a column `margin` if there is one;
here `rm.margin_column` must name it. A reward function has another signature: `f(data_source,
solution_str, ground_truth, extra_info)` scores one response. `{role}` is `actor` in PPO and GRPO,
else `model`; `{optim}` is its optimizer.

Distillation becomes `algorithm.preset: flash_reinforce` with `actor.loss_agg_mode: token-mean` and
without terms of the reward. GKD's rows of messages are to be split: prompts stand in `prompt`, and
the responses of the share that is not drawn in `response`.
"""


def verl_page() -> str:
    """Return `docs/coming_from_verl.md`."""
    names = read_names()
    sections = {theirs: (ours, "") for theirs, ours in names.sections.items()}
    lines = [_VERL]
    lines += ["## Sections", "", *_list(sections), ""]
    lines += ["## Keys below a role", "", *_list(_verl_rows(names.below_a_role)), ""]
    lines += ["## Other keys", "", *_list(_verl_rows(names.elsewhere))]
    return "\n".join(lines) + "\n"


def others_page() -> str:
    """Return `docs/coming_from_trl.md`."""
    lines = [_OTHERS]
    for system, title in _TITLES.items():
        table = read_table(system)
        changes = table["changes"]
        names = {
            theirs: (_name(row), _change(changes, theirs)) for theirs, row in table["names"].items()
        }
        by_program: dict[str, list[str]] = {}
        for program, rows in table["by_program"].items():
            for theirs, row in rows.items():
                by_program.setdefault(theirs, []).append(f"{_name(row)}` ({program})")
        several = {theirs: ", `".join(ours) for theirs, ours in by_program.items()}

        lines += [f"## {title}", "", *_list(names)]
        for theirs, ours in several.items():
            change = changes.get(theirs)
            lines.append(f"- `{theirs}` → `{ours}{f': {change}' if change else ''}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _verl_rows(names: Mapping[str, Name]) -> dict[str, tuple[str, str]]:
    """Keys that are not named alike, and not as the section around them: ours, and what changes."""
    rows = {}
    for theirs, row in names.items():
        ours = (row.ours or "").split(" | ")[0]
        around = names.get(theirs.rpartition(".")[0])
        if ours != theirs and (around is None or around.ours != row.ours or row.change):
            rows[theirs] = (ours, row.change)
    return rows


def _name(row: Any) -> str:
    return str(row[0] if isinstance(row, list) else row)


def _change(changes: Mapping[str, str], theirs: str) -> str:
    return longest_end(changes, theirs) or ""


def _list(names: Mapping[str, tuple[str, str]]) -> list[str]:
    """A line for each of our keys and what changes, with all of their keys that become it."""
    by_key: dict[tuple[str, str], list[str]] = {}
    for theirs, ours_and_change in names.items():
        by_key.setdefault(ours_and_change, []).append(f"`{theirs}`")
    return [
        f"- {', '.join(theirs)} → `{ours}`{f': {change}' if change else ''}"
        for (ours, change), theirs in by_key.items()
    ]

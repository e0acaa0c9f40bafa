"""Translates the values of another system into ours, by the tables beside this file.

What a value becomes stands in `conversions`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from mrlhf.config.imports.conversions import CONVERSIONS, LeftOut, Place
from mrlhf.config.imports.source import Source, System, Unknown, read_table
from mrlhf.config.roots import PROGRAMS, Program
from mrlhf.config.tree import nodes, parents
from mrlhf.config.verl_names import Name, longest_end, translate_name
from mrlhf.errors import ConfigError
from mrlhf.rl.names import policy_loss_traits

_OWN_REWARD = "reward.py:compute_score"


@dataclass
class Imported:
    """A configuration of ours, and what is to be said about it."""

    values: dict[str, Any] = field(default_factory=dict)  # by our dotted keys
    remarks: dict[str, str] = field(default_factory=dict)  # for some of them
    # Their keys that are not in `values`: without counterpart, or for the user to choose.
    missing: dict[str, str] = field(default_factory=dict)
    defaults: set[str] = field(default_factory=set)  # keys that hold a default of the other system
    notes: list[str] = field(default_factory=list)  # what is to be read first


def name_of(system: System, program: Program, theirs: str, trainer: str = "") -> Name | None:
    """Return what a key of a system is here; None if the tables do not know it.

    Rows of the `trainer` go before those of the program.
    """
    table = read_table(system)
    known = nodes(PROGRAMS[program])
    if system == "verl":
        return translate_name(theirs, known)

    of_program = table["by_program"][program] | table["by_program"].get(trainer, {})
    row = of_program.get(theirs, table["names"].get(theirs))
    if row is None:
        around = (table["missing"].get(key) for key in (theirs, *reversed(parents(theirs))))
        reason = next((found for found in around if found is not None), None)
        return None if reason is None else Name(None, reason=reason)
    name, conversion = row if isinstance(row, list) else (row, None)
    conversion = longest_end(table["choices"], theirs) or conversion
    is_ppo = program == "ppo"
    ours = name.format(
        role="actor" if is_ppo else "model",
        optim="actor.optim" if is_ppo else "optim",
        longest="data.max_prompt_length" if is_ppo else "data.max_length",
        epochs="actor.ppo_epochs" if is_ppo else "trainer.total_epochs",
    )
    if ours not in known:
        return Name(None, reason=f"{ours} is no key of this program")
    return Name(ours, conversion, table["changes"].get(theirs, table["changes"].get(ours, "")))


def translate(source: Source, world_size: int) -> Imported:
    """Translate all values, and those that the other system takes where nothing is said.

    Keys that convert come last, since they look at the others.

    Args:
        world_size: the ranks that the values were for, if the source does not name them.

    Raises:
        ConfigError: none of the keys is known.
    """
    result = Imported(notes=list(source.notes))
    given = set(source.values)
    table = read_table(source.system)
    assumed = table.get("assumed", {}).get(source.trainer, {})
    source = replace(source, values={**assumed, **source.values})
    named = {
        theirs: name_of(source.system, source.program, theirs, source.trainer)
        for theirs in source.values
    }
    if not any(name is not None and name.ours for key, name in named.items() if key in given):
        raise ConfigError(f"none of its {len(given)} keys is known of {source.system}")
    for keys, note in table.get("notes", {}).items():
        found = [source.values[key] for key in given if re.fullmatch(keys, key)]
        if any(value not in (False, None, *table.get("own_files", ())) for value in found):
            result.notes.append(note)

    def order(theirs: str) -> tuple[bool, bool, bool]:
        name = named[theirs]
        converts = name is not None and isinstance(name.conversion, str)
        is_length = name is not None and name.ours == "trainer.total_steps"
        return converts, not is_length, theirs in given

    for theirs in sorted(named, key=order):
        name = named[theirs]
        value = source.values[theirs]
        if name is None:
            is_option = source.system == "verl" and theirs.startswith("--")
            reason = "an option of Hydra" if is_option else "not in the table of names"
            result.missing[theirs] = reason
        elif name.ours is None:
            result.missing[theirs] = name.reason or "there is no such thing here"
        elif isinstance(value, Unknown):
            is_argument = re.search(r"\$\{?\d", value.text)
            reason = f"only a run could tell its value, {value.text}"
            result.missing[theirs] = "the script gets it as an argument" if is_argument else reason
        elif value is not None:
            _add(result, source, theirs, name, world_size, theirs in given)
    _complete(result, source)
    return result


def _add(
    result: Imported, source: Source, theirs: str, name: Name, world_size: int, is_given: bool
) -> None:
    assert name.ours is not None
    value = _converted(result, source, theirs, name, world_size)
    if isinstance(value, LeftOut):
        if is_given and (value.reason or name.ours not in result.values):
            result.missing[theirs] = value.reason or name.change or f"{name.ours} keeps its default"
        elif value.is_told:
            result.missing[theirs] = f"{source.system}'s default: {value.reason}"
        return

    was = source.values[theirs]
    for ours, one in (value if isinstance(value, dict) else {name.ours: value}).items():
        result.values[ours] = one
        (result.defaults.discard if is_given else result.defaults.add)(ours)
        remark = [] if one in (was, [was]) else [f"{theirs}: {_shown(was)}"]
        if ours == name.ours and name.change:
            remark.append(name.change)
        result.remarks[ours] = "; ".join(remark)


def _converted(result: Imported, source: Source, theirs: str, name: Name, world_size: int) -> Any:
    """Our value; a dictionary if it is one of several of our keys."""
    value = source.values[theirs]
    if isinstance(name.conversion, Mapping):
        choices = {str(key).lower(): ours for key, ours in name.conversion.items()}
        alone = value[0] if isinstance(value, list) and len(value) == 1 else value
        found = choices.get(str(alone).lower(), choices.get("*", LeftOut()))
        if isinstance(found, LeftOut):
            result.notes.append(f"{theirs}: {_shown(value)} has no counterpart; choose another way")
        return found
    if name.conversion is None:
        return value
    size = source.world_size or world_size
    place = Place(source.values, result.values, name.ours or "", size, theirs)
    try:
        return CONVERSIONS[name.conversion](value, place)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return LeftOut(f"{_shown(value)} is no value that can be translated")


def _complete(result: Imported, source: Source) -> None:
    """Add what the other system means where nothing is said, and what ours needs."""
    values = result.values
    for key, value in _defaults(source, values):
        if key not in values:
            values[key] = value
            result.defaults.add(key)
    if "trainer.total_steps" in values and "trainer.total_epochs" in result.defaults:
        del values["trainer.total_epochs"]
    if source.program != "ppo":
        return

    if values.get("rollout.engine") == "vllm" and values.get("actor.lora.rank"):
        values["rollout.lora"] = "merged"
        result.remarks["rollout.lora"] = "vLLM takes whole weights alone"
    has_critic = _has_critic(values)
    for key in [key for key in result.defaults if key.startswith("critic.") and not has_critic]:
        del values[key]
    if not has_critic:
        told = result.missing.items()
        result.missing = {
            key: reason
            for key, reason in told
            if not (key.startswith("critic.") and "default:" in reason)
        }
    if "actor.tp" not in values and "rollout.tp" in values:
        # FSDP and ZeRO split weights over all ranks.
        for role in ("actor", "critic") if has_critic else ("actor",):
            values[f"{role}.tp"] = values["rollout.tp"]
            result.remarks[f"{role}.tp"] = "there all ranks split it; see docs/parallelism.md"
    if source.system == "trl" and values.get("actor.kl_loss_coef"):
        values["actor.use_kl_loss"] = True
    loss = values.get("actor.policy_loss.loss_mode", "vanilla")
    is_fixed = source.system == "verl" and policy_loss_traits(loss).sequence_level
    if is_fixed and values.pop("actor.loss_agg_mode", None):
        result.missing["actor.loss_agg_mode"] = f"verl does not read it with {loss}"
    if source.trainer == "ppo_trainer":
        for key in [key for key in values if key.startswith("actor.optim.")]:
            values[key.replace("actor", "critic", 1)] = values[key]
            result.remarks[key.replace("actor", "critic", 1)] = "there one optimizer is for both"
    if source.system != "verl" and values.get("algorithm.kl_ctrl.kl_coef"):
        values.setdefault("algorithm.use_kl_in_reward", not values.get("actor.use_kl_loss", False))
    if "reward.terms" not in values:
        is_model = "reward_model.path" in values
        files = [str(file).lower() for file in values.get("data.train_files", [])]
        is_gsm8k = bool(files) and all("gsm8k" in file for file in files)
        term = "reward_model" if is_model else "gsm8k" if is_gsm8k else _OWN_REWARD
        values["reward.terms"] = [{"name": term}]
        result.remarks["reward.terms"] = (
            "" if is_model else "choose it: a rule, or a function of yours as file.py:function"
        )


def _defaults(source: Source, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from read_table(source.system).get("defaults", {}).get(source.trainer, {}).items()
    if source.system == "verl":
        has_critic = _has_critic(values)
        for role in ("actor", "critic"):
            if values.get(f"{role}.tp", 1) > 1 and (has_critic or role == "actor"):
                yield f"{role}.sequence_parallel", True


def _has_critic(values: Mapping[str, Any]) -> bool:
    return values.get("algorithm.adv_estimator", "gae") == "gae"


def leave_out(result: Imported, key: str) -> None:
    """Leave out a key of ours that nothing would read."""
    del result.values[key]
    result.missing[key] = "it has no effect beside the other keys"


def as_yaml(result: Imported, system: System) -> str:
    """Return the configuration as YAML, with a comment where more than the name changed."""
    lines = [f"# first: {note}" for note in result.notes]
    open_sections: list[str] = []
    for key in sorted(result.values, key=_by_section):
        *sections, last = key.split(".")
        shared = 0
        while shared < min(len(sections), len(open_sections)) and (
            sections[shared] == open_sections[shared]
        ):
            shared += 1
        for depth in range(shared, len(sections)):
            lines.append(f"{'  ' * depth}{sections[depth]}:")
        open_sections = sections
        remark = result.remarks.get(key, "")
        if key in result.defaults:
            remark = f"{system}'s default"
        comment = f"  # {remark}" if remark else ""
        value = _shown(result.values[key])
        lines.append(f"{'  ' * len(sections)}{last}: {value}{comment}")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    """The value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _by_section(key: str) -> tuple[list[tuple[int, str]], str]:
    """Keys of a section before its sections, and the sections of the roles first."""
    order = ["actor", "model", "critic", "reference", "reward_model", "rollout", "data", "reward"]
    *sections, last = key.split(".")
    ranks = [(order.index(name) if name in order else len(order), name) for name in sections] or [
        (-1, "")
    ]
    return [*ranks], last

"""Translates the values of another system into ours, by the tables beside this file.

What a value becomes stands in `conversions`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import yaml

from mrlhf.config.imports.conversions import CONVERSIONS, LeftOut, Place
from mrlhf.config.imports.source import Source, System, Unknown, read_table
from mrlhf.config.roots import PROGRAMS, Program
from mrlhf.config.tree import nodes
from mrlhf.config.verl_names import Name, longest_end, nearest_section, translate_name
from mrlhf.errors import ConfigError
from mrlhf.rl.names import policy_loss_traits

_IS_OF_CRITIC = re.compile(r"critic\.").match


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

    of_program = table["by_program"].get(program, {}) | table["by_program"].get(trainer, {})
    row = of_program.get(theirs, table["names"].get(theirs))
    if row is None:
        reason = nearest_section(table["missing"], theirs)
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
    if source.trainer == "ppo_trainer" and "sft_model_path" not in given:
        result.notes.append(
            "the policy is model_name_or_path; TRL's own scripts train sft_model_path, which is "
            "EleutherAI/pythia-160m where it is not given"
        )
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
    for ours, new in (value if isinstance(value, dict) else {name.ours: value}).items():
        result.values[ours] = new
        (result.defaults.discard if is_given else result.defaults.add)(ours)
        remark = [] if new in (was, [was]) else [f"{theirs}: {_shown(was)}"]
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
    convert = CONVERSIONS[name.conversion]
    try:
        return convert(value, place)
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

    if not _has_critic(values):
        for key in filter(_IS_OF_CRITIC, result.defaults):
            del values[key]
        for key in filter(_IS_OF_CRITIC, list(result.missing)):
            if "default:" in result.missing[key]:
                del result.missing[key]
    loss = values.get("actor.policy_loss.loss_mode", "vanilla")
    is_fixed = source.system == "verl" and policy_loss_traits(loss).sequence_level
    if is_fixed and values.pop("actor.loss_agg_mode", None):
        result.missing["actor.loss_agg_mode"] = f"verl does not read it with {loss}"

    for key, value, remark in _needed(source, dict(values)):
        if key not in values:
            values[key] = value
            result.remarks[key] = remark


def _defaults(source: Source, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from read_table(source.system).get("defaults", {}).get(source.trainer, {}).items()
    if source.system == "verl":
        for role in _trained(values):
            if values.get(f"{role}.tp", 1) > 1:
                yield f"{role}.sequence_parallel", True


def _needed(source: Source, ours: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Keys that ours needs where they are not set, each with its value and a remark."""
    if ours.get("rollout.engine") == "vllm" and ours.get("actor.lora.rank"):
        yield "rollout.lora", "merged", "vLLM takes whole weights alone"
    if "actor.tp" not in ours and "rollout.tp" in ours:
        remark = "there all ranks split it; see docs/parallelism.md"  # by FSDP or ZeRO
        for role in _trained(ours):
            yield f"{role}.tp", ours["rollout.tp"], remark
    if source.trainer == "ppo_trainer":
        if "reward_model.path" in ours:
            yield "critic.path", ours["reward_model.path"], "there values start from the scores"
        for key in filter(re.compile(r"actor\.optim\.").match, ours):
            yield key.replace("actor", "critic", 1), ours[key], "there one optimizer is for both"

    has_kl_loss = ours.get("actor.use_kl_loss", False)
    if source.system == "trl" and ours.get("actor.kl_loss_coef"):
        has_kl_loss = True
        yield "actor.use_kl_loss", True, ""
    if source.system != "verl" and ours.get("algorithm.kl_ctrl.kl_coef"):
        yield "algorithm.use_kl_in_reward", not has_kl_loss, ""

    files = [str(file).lower() for file in ours.get("data.train_files", [])]
    if "reward_model.path" in ours:
        yield "reward.terms", [{"name": "reward_model"}], ""
    is_gsm8k = bool(files) and all("gsm8k" in file for file in files)
    rule = "gsm8k" if is_gsm8k else "reward.py:compute_score"
    remark = "choose it: a rule, or a function of yours as file.py:function"
    yield "reward.terms", [{"name": rule}], remark


def _trained(values: Mapping[str, Any]) -> tuple[str, ...]:
    return ("actor", "critic") if _has_critic(values) else ("actor",)


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
        pairs = zip(sections, open_sections, strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
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
    ranks = [(order.index(name) if name in order else len(order), name) for name in sections]
    return ranks or [(-1, "")], last

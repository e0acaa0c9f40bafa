"""The page of all keys and the JSON schemas are up to date, and the shipped files fit them."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from mrlhf.config import PPOConfig, dump_yaml, load_config
from mrlhf.config.tree import nodes
from tests.pages import commands_of
from tests.unit.configurations import ppo
from tools.pages.configuration import LAUNCHERS, TITLES
from tools.pages.json_schema import json_schema, values_of

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
KEYWORDS = {
    "$ref",
    "$schema",
    "$defs",
    "additionalProperties",
    "anyOf",
    "default",
    "description",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "items",
    "maximum",
    "minimum",
    "maxItems",
    "minItems",
    "minLength",
    "pattern",
    "properties",
    "required",
    "title",
    "type",
}


def fits(schema, value, root):
    """Whether `value` obeys `schema`; of JSON schema what ours use."""
    assert set(schema) <= KEYWORDS, schema
    if "$ref" in schema:
        return fits(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema:
        return any(fits(choice, value, root) for choice in schema["anyOf"])

    if not isinstance(value, TYPES[schema["type"]]):
        return False
    if isinstance(value, bool) and schema["type"] != "boolean":
        return False

    if isinstance(value, dict):
        return fields_fit(schema, value, root)
    if isinstance(value, list):
        fits_in = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return fits_in and all(fits(schema["items"], item, root) for item in value)

    if "enum" in schema and value not in schema["enum"]:
        return False
    limits = {
        "minimum": lambda limit: value >= limit,
        "maximum": lambda limit: value <= limit,
        "exclusiveMinimum": lambda limit: value > limit,
        "exclusiveMaximum": lambda limit: value < limit,
        "minLength": lambda limit: len(value) >= limit,
        "pattern": lambda pattern: re.search(pattern, value),
    }
    return all(holds(schema[name]) for name, holds in limits.items() if name in schema)


def fields_fit(schema, fields, root):
    of_any = schema["additionalProperties"]
    if of_any is not False:  # keys of the user's own
        return all(fits(of_any, value, root) for value in fields.values())
    if not set(schema.get("required", ())) <= set(fields) <= set(schema["properties"]):
        return False
    return all(fits(schema["properties"][name], value, root) for name, value in fields.items())


def allowed(launcher, text):
    schema = json_schema(LAUNCHERS[launcher])
    return fits(schema, yaml.safe_load(text), schema)


def test_the_written_files_are_up_to_date(tmp_path, capsys):
    (command,) = commands_of("CONTRIBUTING.md", "write_configuration_page")
    file = ROOT / command.removeprefix("python ")
    spec = importlib.util.spec_from_file_location("write_configuration_page", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--out", str(tmp_path)]) == 0
    written = [Path(line).relative_to(tmp_path) for line in capsys.readouterr().out.splitlines()]
    assert len(written) == 4 + len(LAUNCHERS)  # pages of keys, of metrics and of other systems
    for name in written:
        assert (ROOT / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(
            encoding="utf-8"
        ), f"{name} is out of date; run python tools/write_configuration_page.py"


def chapter_of(page, heading):
    return page.partition(f"\n## {heading}")[2].partition("\n## ")[0]


def lists_that_name(chapter, section, name):
    """The lists of keys that are described elsewhere, of those the ones with this key."""
    start = f"- `{section}`, " if section else "- keys without a section, "
    lists = [line for line in chapter.splitlines() if line.startswith(start)]
    return [line for line in lists if f"`{name}`" in line.partition(": ")[2]]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_page_and_schema_hold_every_key(launcher):
    root_class = LAUNCHERS[launcher]
    names = [key.name for key in nodes(root_class).values() if not key.is_section]
    assert list(values_of(root_class)) == names
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    chapter = chapter_of(page, TITLES[launcher])

    for key in nodes(root_class).values():
        if key.is_section:
            continue
        section, _, name = key.name.rpartition(".")
        found = chapter.count(f"- `{key.name}` (") + len(lists_that_name(chapter, section, name))
        where = f"`{section}`" if section else "keys without a section"
        others = re.findall(rf"^- the lists of (.+) for .*{where}", chapter, re.MULTILINE)
        if not found:
            there = [lists_that_name(chapter_of(page, other), section, name) for other in others]
            found = int(any(there))  # of two chapters with such lists one may be led on from
        assert found == 1, key.name
        assert key.doc in page, key.name


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_name_their_schema_and_fit_it(path):
    first, rest = path.read_text(encoding="utf-8").split("\n", 1)
    schema_file = path.parent / first.removeprefix("# yaml-language-server: $schema=")
    kinds = [kind for kind in ("sft", "rm", "dpo") if kind in path.stem.split("_")]
    if path.parent.name in ("dpo", "algorithms"):
        kinds = ["dpo"] if path.parent.name == "dpo" else []
    launcher = f"train_{kinds[0] if kinds else 'ppo'}"
    assert schema_file.resolve() == ROOT / "configs" / "schema" / f"{launcher}.json"
    schema = json.loads(schema_file.read_text(encoding="utf-8"))
    assert fits(schema, yaml.safe_load(rest), schema)


def test_a_configuration_in_full_fits():
    config = ppo(reward_model={"path": "rm"}, algorithm__reward_norm="group")
    assert allowed("train_ppo", dump_yaml(config))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "critic:",
        "critic: {path: null, ppo_epochs: 2}",
        "data: {tokenizer: null, train_files: one.jsonl, val_files: [a, b]}",
        "rollout: {stop: a, top_p: 1}",
        "reward_model: null",
        "reward: {terms: [{name: gsm8k}, {name: my/file.py:score}]}",
        "actor: {policy_loss: {loss_mode: my/file.py:loss}}",
        "algorithm: {rollout_correction: {preset: bypass_pg_is, rollout_is_threshold: '0.5_5.0'}}",
    ],
)
def test_part_of_a_configuration_fits(text):
    assert allowed("train_ppo", text)


@pytest.mark.parametrize(
    "text",
    [
        "actor: {clip_rato: 0.1}",
        "critics: {}",
        "actor: 3",
        "actor: {tp: 0}",
        "actor: {tp: 1.5}",
        "actor: {use_kl_loss: 1}",
        "actor: {dtype: fp8}",
        "actor: {policy_loss: {loss_mode: vanila}}",
        "reward: {terms: [{name: my/file.py}]}",
        "actor: {clip_ratio: 0}",
        "actor: {clip_ratio: null}",
        "actor: {optim: {lr: fast}}",
        "rollout: {top_p: 1.1}",
        "seed: null",
        "reward: {terms: [{weight: 1}]}",
        "data: {train_files: [1]}",
    ],
)
def test_what_a_file_may_not_hold_does_not_fit(text):
    assert not allowed("train_ppo", text)


def test_what_the_schema_allows_of_inheriting_keys_loads(tmp_path):
    arguments = [
        "actor.path=m",
        "reward.terms=[{name: gsm8k}]",
        "data.train_files=a.jsonl",
        "trainer.output_dir=o",
    ]
    nulls = [f"{key}=null" for key in PPOConfig.inherited]
    assert load_config(PPOConfig, None, arguments + nulls) == load_config(
        PPOConfig, None, arguments
    )

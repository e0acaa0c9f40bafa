"""The pages lead to each other, and what they name is there: headings, keys, files and tables."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mrlhf.config.roots import PROGRAMS
from mrlhf.config.tree import nodes
from mrlhf.errors import ConfigError
from mrlhf.models.families import FAMILIES, Family
from tests.shards import tiny_spec
from tests.sizing import PAGE as MEMORY_PAGE
from tests.sizing import TABLE, table

ROOT = Path(__file__).parents[2]
# Pages of other systems have their keys.
WITH_KEYS = [
    page for page in (ROOT / "docs").glob("*.md") if not page.name.startswith("coming_from")
]
KEYS = {name for root in PROGRAMS.values() for name in nodes(root)}
SECTIONS = {name.partition(".")[0] for name in KEYS if "." in name}
# An item of a list, a key and a column of verl, a file, and a tensor.
OTHERS = {
    "reward.terms.0.weight",
    "trainer.val_only",
    "reward_model.ground_truth",
    "rm.yaml",
    "model.embed_tokens.weight",
}
_KEY = re.compile(rf"`((?:{'|'.join(sorted(SECTIONS))})(?:\.\w+)+)(?:[=: ][^`]*)?`")
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*/README.md"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *RECIPES,
]
PAPERS = re.findall(
    r"^\| [^|]*(?:arXiv|github)[^|]* \| ([^|]*)\| ([^|]*)\| `([^|]*)` \|$",
    (ROOT / "docs" / "papers.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def _text(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def _anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page if not name else page.parent / name
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_an_index_names_every_page_and_recipe() -> None:
    for index in (ROOT / "docs" / "index.md", ROOT / "docs" / "lab" / "README.md"):
        named = re.findall(r"\]\(([^)#\s]+)", index.read_text(encoding="utf-8"))
        linked = {(index.parent / name).resolve() for name in named}
        pages = {page for page in PAGES if page.parent == index.parent} - {index}
        recipes = set(RECIPES) if index.name == "index.md" else set()
        assert not (pages | recipes) - linked


def test_the_readme_leads_to_the_index() -> None:
    assert "](docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", WITH_KEYS, ids=lambda page: page.stem)
def test_its_keys_exist(page: Path) -> None:
    named = set(_KEY.findall(page.read_text(encoding="utf-8")))
    assert not named - KEYS - OTHERS


def test_the_table_of_memory_is_up_to_date() -> None:
    found = TABLE.search(MEMORY_PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == table(), "run python -m tests.sizing"


def test_the_papers_are_those_of_every_preset_and_of_no_other() -> None:
    presets = {path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml")}
    assert {preset.strip().strip("`") for preset, _, _ in PAPERS} - {""} == presets


@pytest.mark.parametrize(("_", "words", "test"), PAPERS)
def test_the_key_and_the_test_file_of_a_paper_are_there(_: str, words: str, test: str) -> None:
    key, _, value = words.strip().strip("`").partition(": ")
    section, _, name = key.rpartition(".")
    row = re.compile(rf"- `{key}(` \(|\.)|- `{section}`, as in .*`{name}`")
    rows = [line for line in _text("configuration.md").splitlines() if row.match(line)]
    assert rows, key
    assert not value or f"`{value}`" in rows[0]
    assert value in (ROOT / "tests" / "unit" / test).read_text(encoding="utf-8")


def test_the_example_of_a_family_reads_a_configuration() -> None:
    [block] = re.findall(r"```python\n(.*?)```", _text("families.md"), re.DOTALL)
    example: dict[str, Any] = {}
    exec(block, example)
    family = example["MY_MODEL"]
    assert (family.model_type, family.class_name("lm")) == ("my_model", "MyModelForCausalLM")

    llama = tiny_spec("llama")
    config = {**llama.hf_config, "model_type": "my_model"}
    spec = family.read_config(config, "lm")
    assert spec.qkv_bias and not llama.qkv_bias
    assert "model.layers.0.self_attn.q_proj.bias" in family.tensor_shapes(spec)
    with pytest.raises(ConfigError, match="use_sliding_window"):
        family.read_config({**config, "use_sliding_window": True}, "lm")


def test_the_pages_of_families_and_models_name_files_fields_and_families_that_exist() -> None:
    page = _text("families.md")
    for path in re.findall(r"`((?:mrlhf|tests)/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path
    for field in fields(Family):
        assert f"`{field.name}`" in page, field.name
    assert not [name for name in FAMILIES if f"| `{name}` |" not in _text("models.md")]

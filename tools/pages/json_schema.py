"""A JSON schema of each launcher's configuration file; editors complete keys and mark mistakes with
it.

It describes a single file: values and unknown keys are checked, but no key is required, since
another file or an argument may give it. It does not check conditions between keys.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from mrlhf.config.roots import Root
from mrlhf.config.tree import nodes

JsonSchema: TypeAlias = dict[str, Any]

DIALECT = "http://json-schema.org/draft-07/schema#"
NULL: JsonSchema = {"type": "null"}


def json_schema(root_class: type[Root]) -> JsonSchema:
    """The JSON schema of one configuration file of `root_class`."""
    schema = root_class.model_json_schema()
    sections: dict[str, JsonSchema] = schema.pop("$defs")
    # A later file replaces a list as a whole, so each item needs its required keys.
    items = {
        node.section.__name__
        for node in nodes(root_class).values()
        if node.section and node.is_list
    }
    for name, section in sections.items():
        _relax(section, keep_required=name in items)
    _relax(schema, keep_required=False)

    for key in root_class.inherited:
        values = sections[nodes(root_class)[key].owner.__name__]["properties"]
        name = key.rpartition(".")[2]
        values[name] = _or_null(values[name])

    return {"$schema": DIALECT, **schema, "$defs": sections}


def values_of(root_class: type[Root]) -> dict[str, JsonSchema]:
    """The schema of every value by its dotted key; `*` stands for the number of a list item."""
    schema = json_schema(root_class)
    sections = {**schema["$defs"], root_class.__name__: schema}
    return {
        node.name: sections[node.owner.__name__]["properties"][node.name.rpartition(".")[2]]
        for node in nodes(root_class).values()
        if not node.is_section
    }


def _relax(section: JsonSchema, keep_required: bool) -> None:
    """Let `section` describe a part of a configuration, as in one file."""
    section.pop("title")
    if not keep_required:
        section.pop("required", None)
    for name, value in section["properties"].items():
        value.pop("title", None)
        value["description"] = " ".join(value["description"].split())
        if "$ref" in value:
            section["properties"][name] = _or_null(value)


def _or_null(value: JsonSchema) -> JsonSchema:
    """`value`, or null, which means a key that is left out."""
    kept: JsonSchema = {key: value[key] for key in ("default", "description") if key in value}
    own = {key: part for key, part in value.items() if key not in kept}
    choices = own.get("anyOf", [own])
    return {"anyOf": choices if NULL in choices else [*choices, NULL], **kept}

"""A JSON schema of each launcher's configuration file, with which editors complete keys and mark
mistakes as a file is written.

It says what a single file may hold: values and unknown keys are checked, but no key is required,
since another file or an argument may give it. What must hold between keys is not in it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from mrlhf.config.roots import Root

JsonSchema: TypeAlias = dict[str, Any]

DIALECT = "http://json-schema.org/draft-07/schema#"
NULL: JsonSchema = {"type": "null"}


def json_schema(root_class: type[Root]) -> JsonSchema:
    """The JSON schema of one configuration file of `root_class`."""
    schema = root_class.model_json_schema()
    sections: dict[str, JsonSchema] = schema.pop("$defs")
    items = _list_items(sections)
    for name, section in sections.items():
        _relax(section, keep_required=name in items)
    _relax(schema, keep_required=False)

    for key in root_class.inherited:
        section_name, name = key.split(".")
        section = sections[_class_name(schema["properties"][section_name])]
        section["properties"][name] = _or_null(section["properties"][name])

    return {"$schema": DIALECT, **schema, "$defs": sections}


def values_of(root_class: type[Root]) -> dict[str, JsonSchema]:
    """The schema of every value by its dotted key; `*` stands for the number of a list item."""
    schema = json_schema(root_class)
    return dict(_walk(schema, schema["$defs"], ""))


def _walk(
    section: JsonSchema, sections: dict[str, JsonSchema], prefix: str
) -> list[tuple[str, JsonSchema]]:
    values: list[tuple[str, JsonSchema]] = []
    for name, value in section["properties"].items():
        key = f"{prefix}{name}"
        if "items" in value and "$ref" in value["items"]:
            values.append((key, value))
            values += _walk(sections[_class_name(value["items"])], sections, f"{key}.*.")
        elif _is_section(value):
            values += _walk(sections[_class_name(value)], sections, f"{key}.")
        else:
            values.append((key, value))
    return values


def _relax(section: JsonSchema, keep_required: bool) -> None:
    """Let `section` stand for a part of a configuration, as one file holds it."""
    section.pop("title")
    if not keep_required:
        section.pop("required", None)
    for name, value in section["properties"].items():
        value.pop("title", None)
        if "$ref" in value:
            section["properties"][name] = _or_null(value)


def _or_null(value: JsonSchema) -> JsonSchema:
    """`value`, or null, which stands for a key that is left out."""
    kept: JsonSchema = {key: value[key] for key in ("default", "description") if key in value}
    own = {key: part for key, part in value.items() if key not in kept}
    choices = own.get("anyOf", [own])
    return {"anyOf": choices if NULL in choices else [*choices, NULL], **kept}


def _list_items(sections: dict[str, JsonSchema]) -> set[str]:
    """The sections that are items of lists; a later file replaces a list as a whole."""
    names = set()
    for section in sections.values():
        for value in section["properties"].values():
            if "items" in value and "$ref" in value["items"]:
                names.add(_class_name(value["items"]))
    return names


def _is_section(value: JsonSchema) -> bool:
    return any("$ref" in choice for choice in value.get("anyOf", [value]))


def _class_name(value: JsonSchema) -> str:
    """The name of the section that `value` refers to."""
    references = [choice["$ref"] for choice in value.get("anyOf", [value]) if "$ref" in choice]
    return str(references[0]).rpartition("/")[2]

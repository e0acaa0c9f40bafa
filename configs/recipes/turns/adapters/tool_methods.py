"""Makes methods of tools that another library describes by a JSON schema.

`rollout.environment` reads the schema of a tool from the signature of a method, so a signature is
made that gives the same schema. This file knows no library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import WithJsonSchema

from mrlhf.environments.programs import RESERVED

Call = Callable[[Any, str, dict[str, Any]], str]


def tool_method(name: str, description: str, schema: Mapping[str, Any], call: Call) -> Any:
    """A method with this name whose arguments have this schema; it returns call(self, name, given).

    An argument that is left out, or null where it may be left out, is not among those given.

    Raises:
        ValueError: the policy cannot be shown such a tool.
    """
    if not name.isidentifier() or name.startswith("_") or name in RESERVED:
        raise ValueError(f"tool {name!r} has a name that a method cannot have here; rename it")
    if "$defs" in schema:
        raise ValueError(f"tool {name}: its schema has $defs; give its arguments plain types")
    required = schema.get("required", ())
    parameters = []
    annotations = {}
    for argument, about in schema.get("properties", {}).items():
        kind = inspect.Parameter.KEYWORD_ONLY
        # A strict schema requires arguments that have a default, too.
        none = inspect.Parameter.empty if argument in required else None
        default = about.get("default", none)
        annotations[argument] = Annotated[Any, WithJsonSchema(dict(about))]
        parameters.append(inspect.Parameter(argument, kind, default=default))

    def method(self: Any, **arguments: Any) -> str:
        given = {
            key: value
            for key, value in arguments.items()
            if value is not None or (key in required and "default" not in schema["properties"][key])
        }
        return call(self, name, given)

    method.__name__ = name
    method.__doc__ = description
    method.__annotations__ = annotations
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
    return method

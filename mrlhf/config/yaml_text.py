"""Reads YAML in the form of a configuration: numbers of YAML 1.2, and each key once.

It does not know any key.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from mrlhf.errors import ConfigError

_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice and reads numbers as YAML 1.2 does.

    1e-4 is a number; 0.5_5 and 1:30 are texts.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML declares it
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            key = self.construct_object(key_node, deep=True)

            if not isinstance(key, str):
                raise ConfigError(f"line {line}: key {key!r} is not text; quote it or remove it")
            if key in seen:
                raise ConfigError(f"line {line}: key '{key}' is given twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    _INT, re.compile(r"^(?:[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


def parse_yaml(text: str, source: str) -> Any:
    """Parse `text`; ConfigError, with its `source`, if it is no YAML or gives a key twice."""
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        hint = "; put quotes around a text that begins with *" if "an alias" in str(error) else ""
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}{hint}") from None

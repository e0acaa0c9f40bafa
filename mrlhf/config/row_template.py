"""A template that a key holds, over the facts of a row of the data.

It does not know which facts there are, nor what the text is for.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mrlhf.errors import ConfigError


def row_template(key: str, text: str, needed: str, variables: Sequence[str]) -> Template:
    """Compile the text of `key`, which names `needed`, and others of `variables` if it likes.

    A ConfigError says that it does not, or is malformed. As a program, the template may fail in any
    way when it is rendered.
    """
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    try:
        names = meta.find_undeclared_variables(environment.parse(text))
        template = environment.from_string(text)
    except TemplateError as error:
        raise ConfigError(f"{key} is no jinja2 template: {error}") from None
    if needed not in names or not names.issubset(variables):
        raise ConfigError(
            f"{key} names {', '.join(sorted(names)) or 'nothing'}; it should name {needed}, "
            f"and may name {', '.join(variables)}"
        )
    return template

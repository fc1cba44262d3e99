"""Reads YAML that people wrote: plain values only, and what is doubtful is refused."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from headway.errors import InvalidSpec


class StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, without its habit that the last of two equal keys wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping. A YAML error when a key stands in it twice; `<<` may be overridden."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value} stands here twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def load_yaml(text: str, loader: type[StrictLoader] = StrictLoader) -> Any:
    """The one document in `text`. InvalidSpec, without the file's name, when it is not YAML."""
    try:
        return yaml.load(text, loader)
    except RecursionError:
        raise InvalidSpec("it is nested too deep") from None
    except (ValueError, yaml.YAMLError, AttributeError) as error:
        # AttributeError: PyYAML on a few malformed tags and timestamps.
        raise InvalidSpec(str(error)) from None

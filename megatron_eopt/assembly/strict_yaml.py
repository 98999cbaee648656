"""A YAML mapping of names to single values, read without guessing.

YAML's own rules turn ``on`` into a truth value and ``1e-3`` into text. Here a value stays the text
that was written until somebody who knows which kind is meant converts it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped,unused-ignore]

from megatron_eopt.base.errors import ConfigurationError


@dataclass(frozen=True)
class Entry:
    """One line ``key: value``.

    Attributes:
        key: The name as written.
        text: The value as written, without quotes.
        quoted: Whether it was in quotes or a block of text.
        place: File and line, for messages.
    """

    key: str
    text: str
    quoted: bool
    place: str

    def error(self, rule: str, way_out: str) -> ConfigurationError:
        """Return the error that this entry breaks ``rule``."""
        return ConfigurationError(f"{self.place}: {self.key}", self.text, rule, way_out)


def read_entries(path: Path) -> list[Entry]:
    """Return the entries of a file in their order.

    Raises:
        ConfigurationError: If there is no such file, it is not UTF-8 or not YAML, it is not one
            mapping of names to single values, or it uses anchors, aliases or tags.
    """
    text = _text(path)
    try:
        _refuse_references(path, text)
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        place = str(path) if mark is None else f"{path}:{mark.line + 1}"
        raise ConfigurationError(
            place, problem, "is not valid YAML", "Write one 'name: value' a line"
        ) from error
    if root is None:
        raise ConfigurationError(
            str(path), "", "holds nothing", "Write one 'name: value' a line, 'optimizer' among them"
        )
    if not isinstance(root, yaml.MappingNode):
        raise ConfigurationError(
            f"{path}:{root.start_mark.line + 1}",
            _kind(root),
            "must be a mapping of names to values",
            "Write one 'name: value' a line",
        )
    return list(_entries(path, root))


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(
            "optimizer_config",
            str(path),
            f"cannot be read: {error.strerror}",
            "Give the path of a YAML file",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            "optimizer_config",
            str(path),
            f"is not UTF-8 text (byte {error.start})",
            "Save the file as UTF-8",
        ) from error


def _refuse_references(path: Path, text: str) -> None:
    for event in yaml.parse(text, yaml.SafeLoader):
        what = None
        if getattr(event, "anchor", None) is not None:
            what = f"{'*' if isinstance(event, yaml.AliasEvent) else '&'}{event.anchor}"
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            what = event.tag
        if what is not None:
            raise ConfigurationError(
                f"{path}:{event.start_mark.line + 1}",
                what,
                "anchors, aliases and tags are not understood",
                "Write the value itself",
            )


def _entries(path: Path, root: yaml.MappingNode) -> Iterator[Entry]:
    for key, value in root.value:
        place = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigurationError(place, _kind(key), "is no name", "Write 'name: value'")
        if not isinstance(value, yaml.ScalarNode):
            raise ConfigurationError(
                f"{place}: {key.value}", _kind(value), "must be a single value", "Write it plainly"
            )
        yield Entry(key.value, value.value, value.style is not None, place)


def _kind(node: yaml.Node) -> str:
    return {"mapping": "a mapping", "sequence": "a list"}.get(node.id, getattr(node, "value", ""))

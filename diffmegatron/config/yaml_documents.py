"""YAML within limits: what a recipe's files and the values of overrides may hold.

Mappings, lists and plain values, as JSON has them; numbers as YAML 1.2 writes them. PyYAML follows
YAML 1.1, which reads ``1e-6`` as text, ``1:30`` as 90 and ``2001-01-01`` as a date. ruamel.yaml
follows 1.2 and refuses a key that is there twice, but it takes longer to import and to read a
recipe, and the limits would be put into it as they are into PyYAML here.
"""

import re
from typing import Any

import yaml

from diffmegatron.errors import UserError
from diffmegatron.files import clipped

# Of a file, which is parsed within a second then; the largest dump of a recipe has two thirds.
MAX_BYTES = 1 << 18
MAX_DEPTH = 32
# Values and keys, those that aliases stand for counted each time.
MAX_NODES = 5_000
# Larger integers are text: no key takes them, and Python stops converting at 4,300 digits.
_DIGITS = 300

_TAG = "tag:yaml.org,2002:"
_NOTATION = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"(?i:true|false|yes|no|on|off)", list("tTfFyYnNoO")),
    "int": (
        rf"[-+]?[0-9][0-9_]{{0,{_DIGITS}}}|0o[0-7]{{1,{_DIGITS}}}|0x[0-9a-fA-F]{{1,{_DIGITS}}}",
        list("-+0123456789"),
    ),
    "float": (
        r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    "merge": (r"<<", ["<"]),
}


class _Notation(yaml.resolver.BaseResolver):
    """What unquoted text stands for, the same for whoever reads and whoever writes."""


for name, (pattern, first) in _NOTATION.items():
    _Notation.add_implicit_resolver(_TAG + name, re.compile(f"^(?:{pattern})$"), first)


class _Dumper(_Notation, yaml.SafeDumper):
    pass


class _Loader(_Notation, yaml.SafeLoader):
    """Refuses, while it reads, what is nested too deep, too much, tagged or twice the same key."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        # Of the node being composed: levels around it, and below it as far as they are known.
        self._depth = self._height = 0
        self._nodes = 0
        # Nodes and levels of each node that is complete: what an alias for it stands for.
        self._extents: dict[yaml.Node | None, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """A node within the limits; those inside come through here too."""
        event, nodes, beside = self.peek_event(), self._nodes, self._height
        if getattr(event, "tag", None) is not None:
            self._refuse(f"tag {event.tag!r} is not one that a recipe has; leave it out", event)
        self._depth += 1
        self._count(1, 0, event)
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if node not in self._extents:
                self._refuse(f"*{event.anchor} is used within what it stands for", event)
            self._count(*self._extents[node], event)
        else:
            self._extents[node] = self._nodes - nodes - 1, self._height
        self._depth, self._height = self._depth - 1, max(beside, self._height + 1)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping that has each key once; PyYAML takes the last of two."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            # Merges (<<) may be several; what is no scalar the constructor refuses by itself.
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if (key.tag, key.value) in seen:
                self._refuse(f"key {clipped(key.value)!r} is there twice; keep one", key)
            seen.add((key.tag, key.value))
        return node

    def _count(self, nodes: int, height: int, event: yaml.Event) -> None:
        self._nodes, self._height = self._nodes + nodes, height
        if self._depth + height > MAX_DEPTH:
            self._refuse(f"it is nested deeper than the {MAX_DEPTH} levels it may have", event)
        if self._nodes > MAX_NODES:
            self._refuse(f"it has more than the {MAX_NODES} values and keys it may have", event)

    def _refuse(self, problem: str, at: Any) -> None:
        raise yaml.composer.ComposerError(None, None, problem, at.start_mark)


def _construct_integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    digits = str(loader.construct_scalar(node)).replace("_", "")
    return int(digits, {"0o": 8, "0x": 16}.get(digits[:2], 10))


_Loader.add_constructor(f"{_TAG}int", _construct_integer)


def parse_yaml(text: str, name: str) -> Any:
    """What a text says in YAML: dictionaries, lists, text, numbers, booleans and None.

    What aliases stand for is one object in several places; nobody may change it.

    Raises:
        UserError: it is not YAML within the limits; ``name`` stands for it in the sentence.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    # PyYAML lets the built-in errors out that escapes beyond Unicode and long versions cause.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"{name} is not valid YAML: {clipped(_said(error))}") from None


def _said(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def dump_yaml(values: Any) -> str:
    """YAML that :func:`parse_yaml` reads back to the same, in the order of the keys."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)

"""Parse and write YAML with limits, for recipe files and the values of overrides and --set.

Numbers follow YAML 1.2, and may also contain underscores (``1_000``). PyYAML's own rules (YAML 1.1)
parse ``1e-6`` as text and ``1:30`` as 90.
ruamel.yaml implements YAML 1.2, but is slower and has no limits on size and nesting.
"""

import re
from typing import Any

import yaml

from diffmegatron.errors import UserError
from diffmegatron.files import shorten

# A file of this size is parsed within a second.
MAX_YAML_BYTES = 1 << 18
MAX_DEPTH = 32
# Limit on nodes (values and keys) of a file. An alias counts as all nodes that it repeats.
MAX_NODES = 5_000
# An integer with more digits is parsed as text. Python's int() refuses more than 4,300 digits.
_DIGITS = 300

_TAG = "tag:yaml.org,2002:"
# Type of unquoted text -> its regular expression, and its possible first characters.
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
    """Rules for the type of unquoted text, shared by the loader and the dumper."""


for name, (pattern, first) in _NOTATION.items():
    _Notation.add_implicit_resolver(_TAG + name, re.compile(f"^(?:{pattern})$"), first)


class _Dumper(_Notation, yaml.SafeDumper):
    pass


class _FastDumper(_Notation, getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Dumper whose text is read back to the same values, and faster if PyYAML has libyaml."""


class _Loader(_Notation, yaml.SafeLoader):
    """Loader that refuses tags, duplicate keys, deep nesting and too many nodes while it reads."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        # Depth of the current node, and levels found below it so far.
        self._depth = self._height = 0
        self._nodes = 0
        # Composed node -> numbers of nodes and levels below it.
        self._extents: dict[yaml.Node | None, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Read the next node with everything below it, and check the limits.

        PyYAML calls this method again for every node below.
        """
        event, nodes, beside = self.peek_event(), self._nodes, self._height
        if getattr(event, "tag", None) is not None:
            self._refuse(f"tag {event.tag!r} is not allowed in a recipe; leave it out", event)
        self._depth += 1
        self._count(1, 0, event)
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if node not in self._extents:
                self._refuse(f"alias *{event.anchor} is within its own value", event)
            self._count(*self._extents[node], event)
        else:
            self._extents[node] = self._nodes - nodes - 1, self._height
        self._depth, self._height = self._depth - 1, max(beside, self._height + 1)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping and refuse duplicate keys; PyYAML would silently use the last one."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            # Merge keys (<<) may repeat. The constructor later refuses keys that are not scalars.
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if (key.tag, key.value) in seen:
                self._refuse(f"key {shorten(key.value)!r} occurs twice; keep one", key)
            seen.add((key.tag, key.value))
        return node

    def _count(self, nodes: int, height: int, event: yaml.Event) -> None:
        self._nodes, self._height = self._nodes + nodes, height
        if self._depth + height > MAX_DEPTH:
            self._refuse(f"it is nested deeper than {MAX_DEPTH} levels", event)
        if self._nodes > MAX_NODES:
            self._refuse(f"it has more than {MAX_NODES} values and keys", event)

    def _refuse(self, problem: str, at: Any) -> None:
        raise yaml.composer.ComposerError(None, None, problem, at.start_mark)


class _ValueLoader(_Loader):
    """Loader of one value, which refuses what YAML would drop: comments and anchors."""

    def scan_to_next_token(self) -> None:
        """Skip white space and refuse a comment."""
        start = self.pointer
        super().scan_to_next_token()
        if "#" in self.buffer[start : self.pointer]:
            self._refuse_unquoted("#")

    def fetch_anchor(self) -> None:
        """Refuse an anchor."""
        self._refuse_unquoted("&")

    def _refuse_unquoted(self, mark: str) -> None:
        problem = f"{mark!r} has a meaning in YAML; put the text that contains it in quotes"
        raise yaml.scanner.ScannerError(None, None, problem, self.get_mark())


def _construct_integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    digits = str(loader.construct_scalar(node)).replace("_", "")
    return int(digits, {"0o": 8, "0x": 16}.get(digits[:2], 10))


_Loader.add_constructor(f"{_TAG}int", _construct_integer)


def parse_yaml(text: str, name: str, loader: type[_Loader] = _Loader) -> Any:
    """Parse YAML into dictionaries, lists, text, numbers, booleans and None.

    Do not modify the result: aliases of a node share one object. ``name`` is for error messages.
    """
    try:
        return yaml.load(text, Loader=loader)
    # An escape beyond Unicode or a huge %YAML version raises ValueError or OverflowError.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"{name} is not valid YAML: {shorten(_message(error))}") from None


def parse_value(text: str, name: str) -> Any:
    """Parse a value of the command line, in which no character is dropped.

    A value that begins with a bracket, a brace or a quotation mark is YAML. Any other value is one
    number, boolean or null in YAML's notation, or else the text as it was typed, in which ``#``,
    ``&``, ``*``, ``!``, ``|`` and ``: `` have no meaning. ``name`` is for error messages.
    """
    if text.startswith(("[", "{", '"', "'")):
        return parse_yaml(text, name, _ValueLoader)
    tag = _Notation().resolve(yaml.ScalarNode, text, (True, False))
    return text if tag in (f"{_TAG}str", f"{_TAG}merge") else parse_yaml(text, name)


def _message(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def dump_yaml(values: Any) -> str:
    """Return YAML that :func:`parse_yaml` reads back unchanged, with keys in their order."""
    try:
        return yaml.dump(values, Dumper=_FastDumper, sort_keys=False)
    except UnicodeEncodeError:
        # libyaml refuses surrogates, which represent the bytes of a path that are not UTF-8.
        return yaml.dump(values, Dumper=_Dumper, sort_keys=False)

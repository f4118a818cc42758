"""The page of the keys of a cluster file, from the section that reads it."""

from diffmegatron.config.keys import default_as_yaml, type_in_words
from diffmegatron.operations.cluster import Cluster, Container
from diffmegatron.section import Section
from tools.reference.markdown import code, head, joined, table

_INTRODUCTION = """\
`diffmegatron launch RECIPE --nodes N --cluster FILE` reads this YAML file, which has the settings
that all runs on a cluster share. `configs/clusters/example.yaml` is one, and
[operations.md](../operations.md#start-a-job) describes `launch`. Keys without a default must be
given."""


def page() -> str:
    """Return the page docs/reference/cluster_file.md."""
    parts = [head("Cluster file", "cluster_file", _INTRODUCTION), _keys(Cluster)]
    return joined([*parts, "## container", _keys(Container)])


def _keys(section: type[Section]) -> str:
    schema = section.model_json_schema()
    rows = [
        (
            code(name),
            type_in_words(schema["properties"][name], schema),
            code(default_as_yaml(field) or ""),
            field.description or "",
        )
        for name, field in section.model_fields.items()
    ]
    return table(("key", "value", "default", "meaning"), rows)

"""What a Parquet schema says of columns: types by name, and the notes of Hugging Face and of packfmt."""

from __future__ import annotations

from typing import Any

from packfmt.bounded_json import parse_json
from packfmt.record import Column
from packfmt.sources.facts import SCHEMA_KEY

__all__ = ["NUMBERS", "class_names", "column_of", "described_features", "kind_of", "noted"]

NUMBERS = {"int8": "|i1", "int16": "<i2", "int32": "<i4", "int64": "<i8", "uint8": "|u1", "uint16": "<u2"}
NUMBERS |= {"uint32": "<u4", "uint64": "<u8", "halffloat": "<f2", "float": "<f4", "double": "<f8", "bool": "|b1"}


def column_of(name: str, kind: str) -> Column | None:
    """The column for values of a kind ("text", "bytes", a number's name, "list of <number>"); None for any other."""
    if kind in ("text", "bytes"):
        return Column(name, "|u1", (None,), "text" if kind == "text" else "bytes")
    if kind.startswith("list of "):
        return Column(name, NUMBERS[kind.removeprefix("list of ")], (None,), tentative=True)
    return Column(name, NUMBERS[kind]) if kind in NUMBERS else None


def noted(schema: Any) -> bytes | None:
    """What packfmt noted in the schema, or None."""
    found: bytes | None = (schema.metadata or {}).get(SCHEMA_KEY)
    return found


def described_features(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """What Hugging Face notes of the columns; empty where it is absent or damaged."""
    try:
        features = parse_json((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def class_names(feature: Any) -> tuple[str, ...]:
    """The names of a ``ClassLabel``, or of a list of them; empty where the feature is neither."""
    if isinstance(feature, dict) and "feature" in feature:
        feature = feature["feature"]
    elif isinstance(feature, list) and len(feature) == 1:  # how older versions note a list
        feature = feature[0]
    names = feature.get("names") if isinstance(feature, dict) else None
    if isinstance(names, dict):
        names = [names.get(str(number)) for number in range(len(names))]
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def kind_of(types: Any, arrow_type: Any) -> str:
    """ "image", "bytes", "text", a number's name, "list of <number>", or "other"; ``types`` is ``pyarrow.types``."""
    if types.is_dictionary(arrow_type):  # how pandas writes categories; reading gives the values
        return kind_of(types, arrow_type.value_type)
    if types.is_struct(arrow_type):
        names = {arrow_type.field(at).name: arrow_type.field(at).type for at in range(arrow_type.num_fields)}
        return "image" if "bytes" in names and kind_of(types, names["bytes"]) == "bytes" else "other"
    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type) or str(arrow_type) == "binary_view":
        return "bytes"
    if types.is_string(arrow_type) or types.is_large_string(arrow_type) or str(arrow_type) == "string_view":
        return "text"
    if types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type):
        inner = kind_of(types, arrow_type.value_type)
        return f"list of {inner}" if inner in NUMBERS else "other"
    name = str(arrow_type)
    return name if name in NUMBERS else "other"

"""Read what a layout needs out of a model config, by field, with the defaults that transformers 5 has for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, cast

import torch

from refdelta.layout.families.common import refuse

__all__ = ["as_mapping", "dtype_of", "read"]

_T = TypeVar("_T")
Config = Mapping[str, Any]


def as_mapping(hf_config: object) -> Config:
    """A transformers config, or the mapping of a config.json, as a mapping."""
    if isinstance(hf_config, Mapping):
        return hf_config
    to_dict = getattr(hf_config, "to_dict", None)
    if not callable(to_dict):
        raise refuse(
            f"expected a transformers config or the mapping of a config.json, found {type(hf_config).__name__}"
        )
    return cast(Config, to_dict())


def read(kind: type[_T], config: Config) -> _T:
    """A dataclass whose fields are entries of the config.

    An absent or null entry takes the field's default; without one it is refused. Metadata: ``or`` names a second
    spelling, ``zero`` says that a number may be 0; all others are positive.
    """
    found: dict[str, Any] = {}
    for item in fields(cast(Any, kind)):
        value = next((config[name] for name in _spellings(item) if config.get(name) is not None), item.default)
        if value is MISSING:
            raise refuse(f"the config has no {item.name}")
        found[item.name] = _checked(item, value)
    return kind(**found)


def _spellings(item: Field[Any]) -> tuple[str, ...]:
    return (item.name, *([item.metadata["or"]] if "or" in item.metadata else []))


def _checked(item: Field[Any], value: Any) -> Any:
    wanted = str(item.type).removesuffix(" | None")
    if wanted == "int":
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not whole or value < (0 if item.metadata.get("zero") else 1)):
            raise refuse(f"the config's {item.name} is {value!r}")
    elif wanted == "bool" and not isinstance(value, bool):
        raise refuse(f"the config's {item.name} is {value!r}")
    elif wanted.startswith("tuple"):
        if not isinstance(value, list | tuple):
            raise refuse(f"the config's {item.name} is {value!r}")
        return tuple(value)
    return value


def dtype_of(*configs: Config) -> torch.dtype:
    """The dtype that the first config to name one says; bfloat16 where none does, as these families are published."""
    for config in configs:
        value = config.get("dtype") or config.get("torch_dtype")
        if value is None:
            continue
        dtype = value if isinstance(value, torch.dtype) else getattr(torch, str(value).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise refuse(f"the config's dtype is {value!r}")
        return dtype
    return torch.bfloat16

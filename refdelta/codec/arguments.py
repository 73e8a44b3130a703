"""Checks of arguments that several public functions take."""

from __future__ import annotations

from os import PathLike

from refdelta.spec import Delta, check_argument

__all__ = ["check_delta", "check_path"]


def check_delta(value: object, name: str = "delta") -> None:
    """Raise `DeltaError` (bad_option) unless ``value``, the argument called ``name``, is a `Delta`."""
    check_argument(name, value, Delta, "a Delta, as read_delta and diff give one")


def check_path(name: str, value: object) -> None:
    """Raise `DeltaError` (bad_option) unless ``value``, the argument ``name``, is a path: a string or `os.PathLike`."""
    check_argument(name, value, (str, PathLike), "a path")

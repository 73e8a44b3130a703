"""A check whose engine did not answer in time runs once more: on a busy machine a late answer is no verdict."""

from __future__ import annotations

import inspect
from typing import Protocol, runtime_checkable

import pytest

from ..findings import InfrastructureFailed, Late


@runtime_checkable
class Restartable(Protocol):
    """What a test is given and what holds an engine: a `Row`."""

    def ready(self) -> None:
        """Make sure that an engine runs, a new one after a late answer."""


def run(item: pytest.Function) -> object:
    """Run the test's function again, each of its rows on a new engine; a second late answer stands.

    Raises InfrastructureFailed where others had the cores meanwhile: then nothing was judged.
    """
    arguments = {name: item.funcargs[name] for name in inspect.signature(item.obj).parameters}
    try:
        for value in arguments.values():
            if isinstance(value, Restartable):
                value.ready()
        return item.obj(**arguments) or True
    except Late as late:
        if late.starved:
            raise InfrastructureFailed(f"twice no answer while other processes had the cores: {late}") from late
        raise

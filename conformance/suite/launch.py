"""Entry point `pytest11`: lets ``pytest --pyargs conformance`` know the suite's options, wherever it is started.

pytest loads the conftest of a package that is named by ``--pyargs`` only while it collects, which is too late for
options.
Anything else that pytest is started for is left alone, and pays for this module alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

PACKAGE = "conformance"


def names_the_suite(arguments: Sequence[str]) -> bool:
    """Whether one of the arguments is the package, a module or a test of it."""
    names = [str(argument).partition("::")[0] for argument in arguments]
    return any(name == PACKAGE or name.startswith(f"{PACKAGE}.") for name in names)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    if early_config.known_args_namespace.pyargs and names_the_suite(args):
        early_config.pluginmanager.import_plugin(f"{PACKAGE}.suite.plugin")

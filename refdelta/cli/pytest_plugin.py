"""Entry point `pytest11`: lets ``pytest --pyargs refdelta_conformance`` know the suite's options, wherever it starts.

pytest loads the conftest of a package that ``--pyargs`` names only while it collects, which is too late for options.
Every other run of pytest is left alone. It costs that run the import of this module and of `suite`.
"""

from __future__ import annotations

import pytest

from refdelta.cli.suite import INSTALLED, names, suite_folder

__all__ = ["pytest_load_initial_conftests"]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    folder = suite_folder() if early_config.known_args_namespace.pyargs else None
    if folder is None:
        return
    if names(args, folder.name):
        early_config.pluginmanager.import_plugin(f"{folder.name}.suite.plugin")
    elif names(args, INSTALLED):
        raise pytest.UsageError(
            f"the refdelta that Python imports here is a clone, whose suite is {folder}: run pytest {folder}, "
            f"or start in another directory for the installed {INSTALLED}"
        )

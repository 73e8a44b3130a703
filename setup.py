"""What is installed: refdelta, and the suite, whose folder `conformance` a wheel installs as `refdelta_conformance`.

`conformance` is a name that other packages use, so a wheel does not take it. An editable install leads to the clone,
where the folder keeps its name. The suite's imports of its own modules are relative, so they hold under both names.
Everything else about the project is in pyproject.toml.
"""

from __future__ import annotations

import shutil
import sys

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDER, INSTALLED = "conformance", "refdelta_conformance"
IN_CLONE_ALONE = ("mutants", "demo")
"""What needs the clone: engines that are broken on purpose, and the demonstration, which starts one of them."""


class BuildPy(build_py):
    """Copies the modules into the wheel, but for those that need the clone."""

    def run(self) -> None:
        """Start from nothing: what an earlier build of this clone left in `build/` would go into the wheel as well."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [entry for entry in found if entry[0] != INSTALLED or entry[1] not in IN_CLONE_ALONE]


refdelta = find_packages(include=["refdelta", "refdelta.*"])
if "editable_wheel" in sys.argv:
    setup(packages=[*refdelta, *find_packages(include=[FOLDER, f"{FOLDER}.*"])])
else:
    rooms = find_packages(FOLDER, exclude=[pattern for name in IN_CLONE_ALONE for pattern in (name, f"{name}.*")])
    setup(
        packages=[*refdelta, INSTALLED, *(f"{INSTALLED}.{room}" for room in rooms)],
        package_dir={INSTALLED: FOLDER},
        cmdclass={"build_py": BuildPy},
    )

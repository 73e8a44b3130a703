"""The sparse_delta v2 conformance suite: ``pytest conformance/ --engine NAME``.

A wheel installs this folder as `refdelta_conformance`: ``pytest --pyargs refdelta_conformance --engine NAME``.
"""

import sys

SUITE_OF = "refdelta"
"""Tells this package from others of the same name."""
_OTHER_NAME = "conformance" if __name__ == "refdelta_conformance" else "refdelta_conformance"

# Two copies would have two of each class and registry: a failure raised by one is not known to the other.
if getattr(sys.modules.get(_OTHER_NAME), "SUITE_OF", None) == SUITE_OF:
    raise ImportError(
        f"two copies of refdelta's conformance suite in one run, {sys.modules[_OTHER_NAME].__file__} and {__file__}: "
        "name and import only one of them"
    )

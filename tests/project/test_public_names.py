"""Every public module of refdelta says which of its names are public: `__all__`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for path in (ROOT / "refdelta").rglob("*.py") if not path.name.startswith("_"))


def assigned(tree: ast.Module) -> set[str]:
    """Names that a module defines or imports at its top level."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_public_module_names_what_is_public(path: Path) -> None:
    tree = ast.parse(path.read_text())
    stated = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
    ]
    assert len(stated) == 1
    assert stated[0]
    assert set(stated[0]) <= assigned(tree)
    assert len(set(stated[0])) == len(stated[0])
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {name for name in defined if not name.startswith("_")} <= set(stated[0]), (
        "a public function or class that the module does not name"
    )

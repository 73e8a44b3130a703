"""Which module may import which: one direction, a small core, vLLM in one place, an oracle that borrows nothing."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the format outwards, one line a floor. A module imports from its own room and from floors below; rooms of one
# floor do not know each other. What is not a folder is a room of one module.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("plain",),
    ("spec",),
    ("codec",),
    ("files",),
    ("layout", "checkpoints", "digest"),
    ("layout.families",),
    ("apply", "encode", "layout_map"),
    ("vllm", "trainer"),
    ("vllm.assumptions",),
    ("vllm.tracing", "vllm.worker", "vllm.plugin"),
    ("vllm.proof",),
    ("vllm.update", "vllm.auditing"),
    ("vllm.calls", "vllm.startup"),
    ("vllm.backend",),
    # Names by which modules of rooms are known outside.
    ("vllm.client", "vllm.trace", "vllm.audit", "vllm.http_engine", "vllm.attest", "vllm.postload"),
    ("store", "telemetry"),
    ("gate", "cli"),
    ("__init__",),
)
LEVEL = {room: level for level, floor in enumerate(FLOORS) for room in floor}
FACADES = ("digest", "apply", "encode", "layout_map")
"""What is imported from outside: re-exports, and nothing inside a room imports one."""
CORE = ("plain", "spec", "codec", "files", "layout", "layout.families", *FACADES)
CORE_NEEDS = frozenset({"torch", "numpy", "safetensors"})
# The suite's only ways into refdelta: the reference engine, and the encoder that feeds live engines.
ADAPTERS = {"conformance/engines.py", "conformance/live/encoder.py"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module or name, dotted; ``eager`` where importing the file imports it too."""

    name: str
    line: int
    eager: bool
    typing_only: bool


def imports_of(source: str, package: str = "") -> list[Import]:
    return list(_walk(ast.parse(source), package, eager=True, typing_only=False))


def _walk(node: ast.AST, package: str, *, eager: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for name in _names(child, package):
            yield Import(name, getattr(child, "lineno", 0), eager and not typing_only, typing_only)
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _walk(ast.Module(child.body, []), package, eager=eager, typing_only=True)
            yield from _walk(ast.Module(child.orelse, []), package, eager=eager, typing_only=typing_only)
        else:
            yield from _walk(child, package, eager=eager and not inside, typing_only=typing_only)


def _names(node: ast.AST, package: str) -> Iterator[str]:
    """The names that an import statement, or a call of ``import_module`` with a literal, brings in."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
        module = ".".join(filter(None, (base, node.module)))
        yield from (f"{module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        match node.args:
            case [ast.Constant(value=str(name)), *_]:
                yield name


def imports(path: Path) -> list[Import]:
    return imports_of(path.read_text(), ".".join(path.relative_to(ROOT).parent.parts))


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"no Python files under {folders}: this test looks in the wrong place"
    return found


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room(dotted: str) -> str:
    """``codec.bits`` -> ``codec``, ``layout.families.qwen3`` -> ``layout.families``, ``vllm.backend`` is its own."""
    parts = dotted.split(".")
    nested = [".".join(parts[:2])] if ".".join(parts[:2]) in LEVEL else []
    return (nested or [parts[0]])[0]


def own_room(path: Path) -> str:
    parts = path.relative_to(ROOT / "refdelta").with_suffix("").parts
    return "__init__" if parts == ("__init__",) else room(".".join(part for part in parts if part != "__init__"))


def internal_target(name: str) -> str | None:
    """The room that an imported name belongs to, ``None`` outside refdelta and for its version."""
    parts = name.split(".")
    if parts[0] != "refdelta" or parts[1:] == ["__version__"]:
        return None
    found = room(".".join(parts[1:])) if len(parts) > 1 else "__init__"
    return found if found in LEVEL else "__init__"


def is_vllm(name: str) -> bool:
    return name.split(".")[0] == "vllm"


# --- the reader itself -------------------------------------------------------------------------------------------


def test_the_reader_sees_every_way_to_import() -> None:
    source = """
import a.b
from c import d
from . import e
from ..f import g
if TYPE_CHECKING:
    import h
else:
    import i
try:
    import j
except ImportError:
    pass
class K:
    import k
def lazy():
    import l
    importlib.import_module("m.n")
__import__("o")
"""
    found = {item.name: (item.eager, item.typing_only) for item in imports_of(source, "top.sub")}
    eager, lazy, typing = (True, False), (False, False), (False, True)
    assert found == {
        "a.b": eager,
        "c.d": eager,
        "top.sub.e": eager,
        "top.f.g": eager,
        "h": typing,
        "i": eager,
        "j": eager,
        "k": eager,
        "l": lazy,
        "m.n": lazy,
        "o": eager,
    }


# --- refdelta ----------------------------------------------------------------------------------------------------


def rooms_imported() -> dict[str, set[str]]:
    """Room -> the rooms that its modules import, lazily and for types too: those couple modules just as much."""
    graph: dict[str, set[str]] = {}
    for path in python_files("refdelta"):
        own = own_room(path)
        found = {internal_target(item.name) for item in imports(path)}
        graph.setdefault(own, set()).update(target for target in found if target not in (None, own))
    return graph


def test_every_room_has_a_floor() -> None:
    missing = {own_room(path) for path in python_files("refdelta")} - LEVEL.keys()
    assert not missing, f"give {missing} a floor in FLOORS"


def test_imports_point_down() -> None:
    """But types of what is above may be named: ``TYPE_CHECKING`` blocks run nowhere."""
    wrong = []
    for path in python_files("refdelta"):
        own = own_room(path)
        for item in imports(path):
            target = internal_target(item.name)
            if target not in (None, own) and not item.typing_only and LEVEL[str(target)] >= LEVEL[own]:
                wrong.append(f"{label(path)}:{item.line} imports {item.name}")
    assert not wrong, "\n".join(wrong)


def test_facades_only_re_export_and_no_room_imports_one() -> None:
    for facade in FACADES:
        body = ast.parse((ROOT / "refdelta" / f"{facade}.py").read_text()).body
        assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in body), facade
    inside = [path for path in python_files("refdelta") if own_room(path) not in ("__init__", *FACADES)]
    wrong = [
        f"{label(path)}:{item.line} imports {item.name}"
        for path in inside
        for item in imports(path)
        if internal_target(item.name) in FACADES
    ]
    assert not wrong, "\n".join(wrong)


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("package", ["refdelta", "conformance"])
def test_no_circle_between_modules(package: str) -> None:
    """Lazy imports count."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in python_files(package)}
    graph: dict[str, set[str]] = {}
    for own, path in modules.items():
        names = [item.name for item in imports(path) if not item.typing_only]
        found = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[own] = {name for name in found if name in modules and name != own}
    assert any(graph.values())
    assert_no_circle(graph)


KNOWN_OUTSIDE = (
    *("spec", "encode", "apply", "digest", "layout_map"),
    *("vllm.client", "vllm.trace", "vllm.audit", "vllm.http_engine", "vllm.attest", "vllm.postload", "vllm.backend"),
)


@pytest.mark.parametrize("module", KNOWN_OUTSIDE)
def test_what_documents_name_can_be_imported(module: str) -> None:
    """And has what it says it has."""
    if module == "vllm.backend":
        pytest.importorskip("vllm", reason="the backend is imported by vLLM alone, which is not installed")
    found = importlib.import_module(f"refdelta.{module}")
    assert all(hasattr(found, name) for name in getattr(found, "__all__", ()))


def test_the_core_needs_only_torch_numpy_and_safetensors() -> None:
    wrong = []
    for path in python_files("refdelta"):
        core = (
            own_room(path) in CORE and path.name != "picture.py"
        )  # which needs matplotlib, and says so where it has none
        for item in imports(path) if core else []:
            top = item.name.split(".")[0]
            if top not in CORE_NEEDS and top not in sys.stdlib_module_names and top != "refdelta":
                wrong.append(f"{label(path)}:{item.line} imports {item.name}")
    assert not wrong, "\n".join(wrong)


PLUGINS = {ROOT / "tests" / "live" / "raising.py", ROOT / "examples" / "native_backend"}
"""Backends of others, which vLLM's own processes import."""


def test_vllm_is_imported_at_module_level_in_one_place() -> None:
    folders = [
        f for f in ("refdelta", "conformance", "tests", "scripts", "examples", "benchmarks") if (ROOT / f).exists()
    ]
    inside = ROOT / "refdelta" / "vllm"
    wrong = [
        f"{label(path)}:{item.line} imports {item.name}"
        for path in python_files(*folders)
        if inside not in path.parents and not PLUGINS & {path, *path.parents}
        for item in imports(path)
        if item.eager and is_vllm(item.name)
    ]
    assert not wrong, "\n".join(wrong)
    assert any(is_vllm(item.name) for path in inside.rglob("*.py") for item in imports(path)), "nothing was looked for"


def loaded_after(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_refdelta_does_not_import_vllm() -> None:
    loaded = loaded_after("import refdelta")
    assert "refdelta" in loaded
    assert not loaded & {"vllm", "transformers"}


def test_nothing_outside_the_vllm_package_loads_vllm() -> None:
    outside = [p for p in python_files("refdelta") if not own_room(p).startswith(("vllm", "__init__"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in outside]
    loaded = loaded_after("\n".join(f"import {name.removesuffix('.__init__')}" for name in names))
    assert "torch" in loaded
    assert not loaded & {"vllm", "transformers"}


# --- the suite ---------------------------------------------------------------------------------------------------


def test_the_suite_imports_refdelta_in_its_adapters_alone() -> None:
    """Equality, so that an adapter which no longer is one loses its licence."""
    borrowing = {
        label(path)
        for path in python_files("conformance")
        if path.parent.name != "mutants"  # refdelta, broken on purpose
        and any(item.name.split(".")[0] == "refdelta" for item in imports(path))
    }
    assert borrowing == ADAPTERS


def test_adapters_load_refdelta_only_when_used() -> None:
    """So the suite's own modules can be imported, and a third party's codec judged, without it."""
    for adapter in ADAPTERS:
        eager = [item.name for item in imports(ROOT / adapter) if item.eager and item.name.startswith("refdelta")]
        assert not eager, f"{adapter} imports {eager} at module level"


def test_the_oracle_is_plain_numpy_and_torch() -> None:
    """And the record of a finding, which imports nothing but the standard library."""
    names = {item.name for item in imports(ROOT / "conformance" / "oracle.py")}
    borrowed = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names | {"numpy", "torch"}}
    assert borrowed == {"conformance.findings.Finding", "conformance.findings.Mismatch"}
    tops = {item.name.split(".")[0] for item in imports(ROOT / "conformance" / "findings.py")}
    assert tops <= sys.stdlib_module_names


def test_neither_the_package_nor_the_suite_imports_the_tests() -> None:
    wrong = [
        f"{label(path)}:{item.line} imports {item.name}"
        for path in python_files("refdelta", "conformance")
        for item in imports(path)
        if item.name.split(".")[0] == "tests"
    ]
    assert not wrong, "\n".join(wrong)

"""Which module may import which: one direction, a small core, vLLM in one place, an oracle that borrows nothing."""

import ast
import importlib
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import rooms
from rooms import FACADES, ROOT, House, imports, imports_of, python_files

CORE = ("plain", "values", "spec", "codec", "files", "layout", "layout.families", *FACADES)
CORE_NEEDS = frozenset({"torch", "numpy", "safetensors"})
# The suite's only ways into refdelta: the reference engine, and the encoder that feeds live engines.
ADAPTERS = {"conformance/engines/codecs.py", "conformance/live/encoder.py", "conformance/live/failing.py"}


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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


HOUSES = pytest.mark.parametrize("house", [rooms.CORE, rooms.SUITE], ids=["refdelta", "conformance"])


def level_of(house: House) -> dict[str, int]:
    return {room: level for level, floor in enumerate(house.floors) for room in floor}


@HOUSES
def test_every_room_has_a_floor(house: House) -> None:
    missing = {rooms.own_room(path, house) for path in python_files(house.package)} - level_of(house).keys()
    assert not missing, f"give {missing} a floor in scripts/rooms.py"


@HOUSES
def test_imports_point_down(house: House) -> None:
    """Lazy ones too. Types of what is above may be named: ``TYPE_CHECKING`` blocks run nowhere."""
    wrong, level = [], level_of(house)
    for path in python_files(house.package):
        own = rooms.own_room(path, house)
        for item in imports(path):
            target = rooms.target_room(item.name, house)
            if target in (None, own) or item.typing_only or (own, target) == ("mutants", "chapters"):
                continue
            if level[str(target)] >= level[own]:
                wrong.append(f"{label(path)}:{item.line} imports {item.name}")
    assert not wrong, "\n".join(wrong)


def test_an_import_that_points_up_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazy import from the cellar to the roof."""
    for name, text in {"spec": "def lazy():\n    import refdelta.cli\n", "cli": "from refdelta import spec\n"}.items():
        (tmp_path / "refdelta").mkdir(exist_ok=True)
        (tmp_path / "refdelta" / f"{name}.py").write_text(text)
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    assert rooms.rooms_imported(rooms.CORE) == {"cli": {"spec"}, "spec": {"cli"}}
    with pytest.raises(pytest.fail.Exception, match="cli"):
        assert_no_circle(rooms.rooms_imported(rooms.CORE))


@HOUSES
def test_no_circle_between_rooms(house: House) -> None:
    assert_no_circle(rooms.rooms_imported(house))


def test_the_drawings_show_what_the_source_says() -> None:
    for name, drawing in rooms.drawings().items():
        assert (rooms.DRAWINGS / name).read_text() == drawing, f"run `python scripts/rooms.py`: {name}"
        assert drawing.count('rx="5"') <= 12, f"{name}: at most twelve rooms on a sheet"


def test_facades_only_re_export_and_no_room_imports_one() -> None:
    for facade in FACADES:
        body = ast.parse((ROOT / "refdelta" / f"{facade}.py").read_text()).body
        assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in body), facade
    inside = [
        path for path in python_files("refdelta") if rooms.own_room(path, rooms.CORE) not in ("__init__", *FACADES)
    ]
    wrong = [
        f"{label(path)}:{item.line} imports {item.name}"
        for path in inside
        for item in imports(path)
        if rooms.target_room(item.name, rooms.CORE) in FACADES
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
        # The picture needs matplotlib, and says so where there is none.
        core = rooms.own_room(path, rooms.CORE) in CORE and path.name != "picture.py"
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
    outside = [
        p for p in python_files("refdelta") if not rooms.own_room(p, rooms.CORE).startswith(("vllm", "__init__"))
    ]
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
    names = {item.name for path in python_files("conformance/oracle") for item in imports(path)}
    own = sys.stdlib_module_names | {"numpy", "torch"}
    borrowed = {n for n in names if n.split(".")[0] not in own and not n.startswith("conformance.oracle")}
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

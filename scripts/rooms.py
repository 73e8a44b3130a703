"""Which room imports which: read from the source, held to the floors below, and drawn for docs/ARCHITECTURE.md.

    python scripts/rooms.py            draw docs/rooms/*.svg anew
    python scripts/rooms.py --check    exit 1 where a drawing is not what the source says

A room is a folder, or a module that stands alone. A floor is a line of rooms that do not import each other; imports
point down. Imports inside functions count like any other. Those for types alone are drawn nowhere: they run nowhere.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DRAWINGS = ROOT / "docs" / "rooms"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module or name, dotted; ``eager`` where importing the file imports it too."""

    name: str
    line: int
    eager: bool
    typing_only: bool


@dataclass(frozen=True, slots=True)
class House:
    """A package and its rooms, from the ground up. ``aliases``: rooms that a sheet draws as one."""

    package: str
    title: str
    floors: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, str]
    """Room -> the name that it is drawn under."""


FACADES = ("digest", "apply", "encode", "layout_map")
"""What is imported from outside: re-exports, and nothing inside a room imports one."""
NAMES_OUTSIDE = ("vllm.client", "vllm.trace", "vllm.audit", "vllm.http_engine", "vllm.attest", "vllm.postload")
"""Names by which modules of rooms are known outside."""

FLOORS: tuple[tuple[str, ...], ...] = (
    ("plain", "values"),
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
    NAMES_OUTSIDE,
    ("store", "telemetry"),
    ("gate", "cli"),
    ("__init__",),
)
SUITE_FLOORS: tuple[tuple[str, ...], ...] = (
    ("findings",),
    ("oracle",),
    ("engines",),
    ("inputs",),
    ("driving", "golden"),
    ("live",),
    ("suite", "demo"),
    ("chapters",),
    ("mutants",),
)

CORE = House(
    "refdelta",
    "refdelta",
    FLOORS,
    {room: "vllm" for floor in FLOORS for room in floor if room.startswith("vllm")}
    | dict.fromkeys(FACADES, "apply, encode, digest, layout_map")
    | {"plain": "spec", "values": "spec", "layout.families": "layout"},
)
VLLM = House(
    "refdelta",
    "refdelta.vllm",
    FLOORS,
    {room: room.removeprefix("vllm.") for floor in FLOORS for room in floor if room.startswith("vllm.")}
    | dict.fromkeys(NAMES_OUTSIDE, "client, trace, audit, ..."),
)
SUITE = House("conformance", "conformance", SUITE_FLOORS, {})


# --- reading ---------------------------------------------------------------------------------------------------------


def imports_of(source: str, package: str = "") -> list[Import]:
    """Every import in a module's source; relative ones are made absolute with its ``package``."""
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
    """Every import of a file of this repository."""
    return imports_of(path.read_text(), ".".join(path.relative_to(ROOT).parent.parts))


def python_files(*folders: str) -> list[Path]:
    """The Python files under ``folders``; there are some."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"no Python files under {folders}: this looks in the wrong place"
    return found


def room_of(dotted: str, floors: Sequence[Sequence[str]]) -> str:
    """``codec.bits`` -> ``codec``, ``layout.families.qwen3`` -> ``layout.families``; ``chapters`` for tests on top."""
    known = {room for floor in floors for room in floor}
    parts = [part for part in dotted.split(".") if part != "__init__"]
    if not parts:
        return "__init__" if "__init__" in known else "chapters"
    if ".".join(parts[:2]) in known:
        return ".".join(parts[:2])
    return "chapters" if "chapters" in known and parts[0].startswith(("test_", "conftest")) else parts[0]


def own_room(path: Path, house: House) -> str:
    """The room that a file stands in."""
    return room_of(".".join(path.relative_to(ROOT / house.package).with_suffix("").parts), house.floors)


def target_room(name: str, house: House) -> str | None:
    """The room that an imported name belongs to; ``None`` outside the package, and for its version."""
    parts = name.split(".")
    if parts[0] != house.package or parts[1:] == ["__version__"]:
        return None
    found = room_of(".".join(parts[1:]), house.floors)
    top = {room for floor in house.floors for room in floor}
    return found if found in top else "__init__"


def rooms_imported(house: House) -> dict[str, set[str]]:
    """Room -> the rooms that its modules import when they run."""
    graph: dict[str, set[str]] = {}
    for path in python_files(house.package):
        own = own_room(path, house)
        found = {target_room(item.name, house) for item in imports(path) if not item.typing_only}
        graph.setdefault(own, set()).update(target for target in found if target not in (None, own))
    return graph


# --- drawing ---------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _BOX_HEIGHT, _ROOM_GAP = 760, 74, 34, 18


def sheet(house: House, *, only: str = "") -> str:
    """The rooms of a house as an SVG; with ``only``, those whose names begin so."""
    graph = rooms_imported(house)
    shown = [[r for r in floor if r in graph and r.startswith(only) and r != "__init__"] for floor in house.floors]
    names = {room: house.aliases.get(room, room) for floor in shown for room in floor}
    floors = _floors([[names[room] for room in floor] for floor in shown])
    arrows = {(names[a], names[b]) for a, found in graph.items() for b in found if a in names and b in names}
    return _svg(house.title, floors, sorted((a, b) for a, b in arrows if a != b))


def _floors(named: list[list[str]]) -> list[list[str]]:
    """Each name once, on the highest floor that has it; floors that are empty are left out."""
    last = {name: number for number, floor in enumerate(named) for name in floor}
    kept = [[*dict.fromkeys(n for n in floor if last[n] == number)] for number, floor in enumerate(named)]
    return [floor for floor in kept if floor]


def _svg(title: str, floors: list[list[str]], arrows: list[tuple[str, str]]) -> str:
    height = _HEIGHT * len(floors) + 20
    boxes: dict[str, tuple[float, float, float]] = {}
    for level, floor in enumerate(reversed(floors)):
        widths = [max(90, 9 * len(name) + 24) for name in floor]
        left: float = (_WIDTH - sum(widths) - _ROOM_GAP * (len(floor) - 1)) / 2 + (level % 3 - 1) * 150
        for name, width in zip(floor, widths, strict=True):
            boxes[name] = (left, 10 + level * _HEIGHT, width)
            left += width + _ROOM_GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f"<title>{escape(title)}: which room imports which</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for above, below in arrows:
        (x1, y1, w1), (x2, y2, w2) = boxes[above], boxes[below]
        lines.append(
            f'<path d="M{x1 + w1 / 2:.0f} {y1 + _BOX_HEIGHT:.0f}L{x2 + w2 / 2:.0f} {y2:.0f}" stroke="#99a" fill="none" '
            'marker-end="url(#tip)"/>'
        )
    for name, (x, y, w) in boxes.items():
        lines.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{_BOX_HEIGHT}" rx="5" fill="#eef3ff" '
            f'stroke="#334"/><text x="{x + w / 2:.0f}" y="{y + 22:.0f}" font-size="14" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def drawings() -> dict[str, str]:
    """File name -> SVG, of every sheet."""
    return {
        "refdelta.svg": sheet(CORE),
        "vllm.svg": sheet(VLLM, only="vllm."),
        "conformance.svg": sheet(SUITE),
    }


def main(arguments: Sequence[str]) -> int:
    """Draw, or check."""
    if list(arguments) not in ([], ["--check"]):
        print(__doc__)
        return 2
    stale = [name for name, svg in drawings().items() if _text(DRAWINGS / name) != svg]
    if not arguments:
        DRAWINGS.mkdir(parents=True, exist_ok=True)
        for name, svg in drawings().items():
            (DRAWINGS / name).write_text(svg)
    print(f"{len(stale)} of {len(drawings())} drawings {'were' if not arguments else 'are'} not what the source says")
    return 1 if arguments and stale else 0


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

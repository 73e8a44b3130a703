"""The picture in README.md: trainer, delta, engine and oracle.

python scripts/picture.py            draw docs/picture.svg anew
python scripts/picture.py --check    exit 1 where the drawing is not what this script draws
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

DRAWING = Path(__file__).resolve().parents[1] / "docs" / "picture.svg"
WIDTH, HEIGHT = 820, 350
LETTER = 6.4
"""Width of an average letter at the size of a box's lines, in pixels: what a line needs to stay inside its box."""


@dataclass(frozen=True, slots=True)
class Card:
    """A box with a title and some lines. Numbers are pixels from the upper left corner of the picture."""

    title: str
    lines: tuple[str, ...]
    x: int
    y: int
    fill: str
    width: int = 200
    height: int = 92

    @property
    def middle(self) -> tuple[int, int]:
        """The centre of the box."""
        return self.x + self.width // 2, self.y + self.height // 2


TRAINER = Card(
    "Trainer", ("keeps a copy of what it last", "sent and compares the bits:", "about 1 % differ"), 20, 44, "#fff4dd"
)
DELTA = Card(
    "Delta", ("the positions that changed", "and their new values,", "as safetensors + JSON"), 310, 44, "#ffffff"
)
ENGINE = Card(
    "vLLM engine", ("writes into live weights,", "on every rank or on none,", "without a restart"), 600, 44, "#e3efff"
)
CHECKPOINT = Card("New checkpoint", ("the trainer's whole state", "after the same step"), 20, 238, "#ffffff")
ORACLE = Card("Oracle: a fresh engine", ("vLLM loads the checkpoint,", "without refdelta"), 310, 238, "#e3efff")
VERDICT = Card(
    "Verdict", ("every parameter and buffer", "on every rank:", "equal bit for bit, or not"), 600, 238, "#e2f5e4"
)
CARDS = (TRAINER, DELTA, ENGINE, CHECKPOINT, ORACLE, VERDICT)
ARROWS = (
    (TRAINER, DELTA, "encode"),
    (DELTA, ENGINE, "apply"),
    (TRAINER, CHECKPOINT, "save"),
    (CHECKPOINT, ORACLE, "load"),
    (ENGINE, VERDICT, "read"),
    (ORACLE, VERDICT, "read"),
)
BANDS = ((24, "Each training step"), (216, "In the conformance suite, to judge that engine"))
"""Height of a heading -> what stands below it."""


def svg() -> str:
    """The picture."""
    return "\n".join(
        [*_head(), *_bands(), *(line for arrow in ARROWS for line in _arrow(*arrow)), *_cards(), "</svg>", ""]
    )


def _head() -> Iterator[str]:
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    yield "<title>A trainer sends a delta to a vLLM engine; the suite compares that engine with a fresh one</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'


def _bands() -> Iterator[str]:
    for y, label in BANDS:
        yield _text(WIDTH // 2, y, label, size=13, colour="#667")
    yield f'<path d="M20 186H{WIDTH - 20}" stroke="#99a" stroke-dasharray="5 5"/>'


def _arrow(start: Card, end: Card, label: str) -> Iterator[str]:
    """An arrow to the right between two boxes of a row, or down between two of a column."""
    y1, (x2, y2) = start.middle[1], end.middle
    if y1 == y2:
        left, right = start.x + start.width, end.x - 3
        yield f'<path d="M{left} {y1}H{right - 8}" stroke="#334" stroke-width="1.6"/>'
        yield f'<path d="M{right} {y1}l-10 -5v10z" fill="#334"/>'
        yield _text((left + right) // 2 - 2, y1 - 8, label, size=13)
    else:
        top, bottom = start.y + start.height, end.y - 3
        yield f'<path d="M{x2} {top}V{bottom - 8}" stroke="#334" stroke-width="1.6"/>'
        yield f'<path d="M{x2} {bottom}l-5 -10h10z" fill="#334"/>'
        yield _text(x2 + 9, top + 28, label, size=13, anchor="start")


def _cards() -> Iterator[str]:
    for card in CARDS:
        centre = card.middle[0]
        yield (
            f'<rect x="{card.x}" y="{card.y}" width="{card.width}" height="{card.height}" rx="6" fill="{card.fill}" '
            'stroke="#334"/>'
        )
        yield _text(centre, card.y + 23, card.title, size=15, weight="bold")
        for number, line in enumerate(card.lines):
            yield _text(centre, card.y + 44 + 17 * number, line, size=13)


def _text(
    x: int, y: int, words: str, *, size: int, anchor: str = "middle", weight: str = "", colour: str = "#223"
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{bold}>{escape(words)}</text>'
    )


def main(arguments: Sequence[str]) -> int:
    """Draw, or check."""
    if list(arguments) not in ([], ["--check"]):
        print(__doc__)
        return 2
    drawn = DRAWING.exists() and DRAWING.read_text() == svg()
    if not arguments:
        DRAWING.write_text(svg())
        print(f"wrote {DRAWING}")
        return 0
    print("docs/picture.svg is " + ("what the script draws" if drawn else "not what the script draws"))
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

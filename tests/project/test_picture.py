"""The picture in README.md is what its script draws, and its words stay inside their boxes."""

from pathlib import Path

import picture
import pytest
from picture import CARDS, DRAWING, LETTER


def test_the_picture_is_what_the_script_draws() -> None:
    assert DRAWING.read_text() == picture.svg(), "run `python scripts/picture.py`"


def test_check_tells_a_stale_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert picture.main(["--check"]) == 0
    stale = tmp_path / "picture.svg"
    stale.write_text(picture.svg().replace("encode", "decode"))
    monkeypatch.setattr(picture, "DRAWING", stale)
    assert picture.main(["--check"]) == 1


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.title)
def test_words_stay_inside_their_box(card: picture.Card) -> None:
    assert max(len(line) for line in card.lines) * LETTER < card.width - 8
    assert 44 + 17 * (len(card.lines) - 1) < card.height - 8
    assert card.x + card.width <= picture.WIDTH
    assert card.y + card.height <= picture.HEIGHT

"""How long Hypothesis may look for a smaller failing example: its own five minutes are too long for each of many tests.

Hypothesis offers no setting for it, only a module constant that it reads when shrinking begins, and says may be
replaced. A version without the constant shrinks as long as it likes, and everything else works.
"""

from __future__ import annotations

import importlib
import re

from hypothesis import Phase

SECONDS = 15
"""After these, the smallest failing example so far is the one that is shown."""
MODULE, NAME = "hypothesis.internal.conjecture.engine", "MAX_SHRINKING_SECONDS"
"""Where Hypothesis has its own bound; internal, so it may go."""
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)
"""All but `explain`, which runs a failing example again and again, beyond any bound."""

_WARNING = re.compile(r"WARNING: Hypothesis has spent more than five minutes.*?for everyone\.", re.DOTALL)


def bound() -> bool:
    """Bound shrinking in this process; whether this Hypothesis has the constant."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError:
        return False
    known = hasattr(module, NAME)
    if known:
        setattr(module, NAME, SECONDS)
    return known


def honest(text: str) -> str:
    """What Hypothesis reports of a test, without its words on a bound of five minutes that is not the one set here."""
    return _WARNING.sub(f"The example may not be the smallest: shrinking ends after {SECONDS} s.", text)

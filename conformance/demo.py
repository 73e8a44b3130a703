"""One delta into a tiny live engine and the verdict on it; then the same with an engine that is broken on purpose.

``python -m conformance.demo`` (``make demo``) takes under two minutes. It shows on one example what the suite does in
full: nothing here is a check of its own. Exit 0 when the sound engine passed and the broken one was caught.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from . import oracle
from .engines import interrupts
from .findings import InfrastructureFailed
from .inputs import checkpoints
from .live.row import Backend, Row
from .live.truth import Truths

MODEL = "qwen3-untied"
FAULT = "conformance.mutants.live:k_and_v_swapped"
IN_WORDS = "the changes of k_proj land in v_proj's rows, and the reverse"
_SHOWN = 4

Say = Callable[[str], None]


INTERRUPTED = 130


def main() -> int:
    """Run the demonstration; 0 when it shows what it should, 1 when it does not, 3 when no engine starts, 130 when it
    is interrupted."""
    restore = interrupts.install()
    try:
        return _main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        restore()


def _main() -> int:
    with tempfile.TemporaryDirectory(prefix="refdelta-demo-") as scratch:
        root = Path(scratch)
        try:
            return _demonstrate(root, _say)
        except InfrastructureFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 3


def _say(text: str) -> None:
    print(text, flush=True)


def _demonstrate(root: Path, say: Say) -> int:
    began = time.monotonic()
    checkpoint = checkpoints.make(MODEL, root / "base")
    truths = Truths(root / "truth")
    rows = [Row(checkpoint, 1, backend, truths, _made(root / name)) for name, backend in _BACKENDS.items()]
    try:
        say(
            f"1. A tiny Qwen3 of {oracle.total_elements(rows[0].base):,} bf16 elements in vLLM with refdelta's backend."
        )
        sound = _verdict(rows[0], say)
        say(f"\n2. The same with a backend that is broken on purpose: {IN_WORDS}.")
        broken = _verdict(rows[1], say)
    finally:
        for row in rows:
            row.close()
        truths.close()
    say(f"\nDone in {time.monotonic() - began:.0f} s. `make conformance` does this for every model, check and rank.")
    return 0 if sound and not broken else 1


_BACKENDS = {"sound": Backend(), "broken": Backend(modules=(FAULT,))}


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _verdict(row: Row, say: Say) -> bool:
    """Send one delta and compare every bit with a fresh engine's; whether they are equal."""
    row.ready()
    delta = row.delta(row.other)
    patches = row.patches(row.other)
    changed, sizes = sum(len(patch.indices) for patch in patches), [p.stat().st_size for p in delta.iterdir()]
    whole = sum(tensor.numel() * tensor.itemsize for tensor in row.base.values())
    size = f"{sum(sizes):,} of {whole:,} bytes"
    say(f"   A delta of {len(patches)} tensors, {changed:,} changed elements, {size},")
    say("   is applied in place. Then every parameter is compared with those of an engine started afresh.")
    try:
        row.accepts(row.other, delta)
        row.answers_as_truth()
    except AssertionError as error:
        say("   Verdict: NOT EQUAL.")
        for line in str(error).splitlines()[: _SHOWN + 1]:
            say(f"     {line}")
        return False
    say(f"   Verdict: equal. {_compared(row)}, bit for bit; tokens and log-probabilities too.")
    return True


def _compared(row: Row) -> str:
    (rank,) = row.truth(row.current).dumps
    return f"{len(rank.entries)} parameters and buffers"


if __name__ == "__main__":
    sys.exit(main())

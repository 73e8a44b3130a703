"""Write the golden vectors.

python -m conformance.golden            write `conformance/vectors/` anew
python -m conformance.golden DIRECTORY  write them elsewhere
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .corpus import CORPUS
from .writing import write


def main(arguments: Sequence[str]) -> None:
    """Write the corpus where the only argument says, or into its place."""
    directory = Path(arguments[0]) if arguments else CORPUS
    print(f"{write(directory)} vectors in {directory}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""A C++ compiler that compiles the same source once: what compiled engines of one run call in place of ``g++``.

vLLM's compiled engines spend most of their start in the C++ compiler, and every one of them begins with empty caches,
so that no graph of another engine can stand in for its own. The kernels' C++ source is the same text in all of them.
This program keeps each shared object under the hash of source, arguments and compiler. It runs the real compiler for
everything that it does not know, and whenever anything is odd. Weights are never part of a kernel's source (frozen
constants are refused by the backend); if they were, the source would differ, and so would the hash.

``install(home, environment)`` gives the variables that make an engine use it. Run as a program it needs no package.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile

REAL, STORE = "CXX_BEHIND_THE_CACHE", "CXX_CACHE"


def install(home: str, environment: "os._Environ[str] | dict[str, str]") -> dict[str, str]:
    """Variables with which engines compile through this program; none where there is no compiler."""
    real = shutil.which(environment.get("CXX") or "g++")
    if real is None:
        return {}
    script = os.path.join(home, "g++")  # the name tells PyTorch which kind of compiler it is
    with open(script, "w") as file:
        file.write(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{os.path.abspath(__file__)}" "$@"\n')
    os.chmod(script, 0o755)
    return {"CXX": script, REAL: real, STORE: home}


def main(arguments: list[str]) -> int:
    """Compile, or copy what the same call gave before; the compiler's exit status."""
    real = os.environ[REAL]
    known = _place(real, arguments)
    if known is None:
        os.execv(real, [real, *arguments])
    stored, out = known
    if os.path.exists(stored):
        _copy(stored, out)
        return 0
    status = subprocess.call([real, *arguments])
    if status == 0 and os.path.exists(out):
        _copy(out, stored)
    return status


def _place(real: str, arguments: list[str]) -> "tuple[str, str] | None":
    """Where the result of this call is kept, and where it goes; None for a call that is not from one source to one."""
    sources = [word for word in arguments if word.endswith(".cpp")]
    if len(sources) != 1 or arguments.count("-o") != 1 or arguments[-1] == "-o" or "-shared" not in arguments:
        return None
    out = arguments[arguments.index("-o") + 1]
    home = os.path.dirname(sources[0])
    shape = [word.replace(sources[0], "SOURCE").replace(out, "OUT").replace(home, "HOME") for word in arguments]
    found = os.stat(real)
    key = hashlib.sha256(repr((real, found.st_size, found.st_mtime_ns, shape)).encode())
    with open(sources[0], "rb") as file:
        key.update(file.read())
    return os.path.join(os.environ[STORE], key.hexdigest() + ".so"), out


def _copy(source: str, target: str) -> None:
    """A whole file or none: another compiler may be at the same work."""
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(os.path.abspath(target)), delete=False) as draft:
        draft.close()
        shutil.copyfile(source, draft.name)
        os.chmod(draft.name, 0o755)
        os.replace(draft.name, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What refdelta needs from the operating system. Where it is missing, one sentence says so."""

from __future__ import annotations

try:
    import fcntl
except ImportError:
    import platform

    system = platform.system() or "another system"
    raise ImportError(f"refdelta runs on POSIX systems alone (Linux, macOS); this is {system}, without fcntl") from None

__all__ = ["fcntl"]

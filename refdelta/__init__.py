"""refdelta: the reference implementation of sparse_delta v2."""

__version__ = "0.1.0"

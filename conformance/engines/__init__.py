"""The codecs under test: Python adapters and programs in any language. What adapters import is here."""

from .codecs import BadEngine, CannotStart, Codec, Declaring, FullCodec, Loading, Reference, load

__all__ = ["BadEngine", "CannotStart", "Codec", "Declaring", "FullCodec", "Loading", "Reference", "load"]

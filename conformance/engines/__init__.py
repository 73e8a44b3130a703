"""The codecs under test: Python adapters and programs in any language."""

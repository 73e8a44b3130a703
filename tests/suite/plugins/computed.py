"""Computes what it offers, so that it would have to be imported."""

CAPABILITIES = {"roll" + "back"}
raise ImportError("the suite's own process must not import a plugin")

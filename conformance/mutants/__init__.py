"""Engines that are wrong in one way each, and the proof that the suite catches every one: docs/MUTANTS.md."""

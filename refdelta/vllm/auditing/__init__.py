"""Audits of a live engine against checkpoint files, and their report."""

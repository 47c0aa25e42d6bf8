"""Loads: which are measured, by what, and what is read of it."""

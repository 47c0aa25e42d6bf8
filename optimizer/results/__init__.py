"""Recommendation of a run, and its output on the terminal, in its folder and in reports."""

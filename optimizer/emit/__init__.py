"""Writes the recommendation of a run as files for production, one module per family of formats."""

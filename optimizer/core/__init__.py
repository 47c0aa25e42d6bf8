"""Errors, interfaces, trials, processes, files and texts: what all packages share."""

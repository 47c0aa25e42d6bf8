"""Runs a suite of tuning runs within one budget and compares it with the batch before."""

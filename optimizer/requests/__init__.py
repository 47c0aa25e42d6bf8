"""Requests made of random, zero or recorded data."""

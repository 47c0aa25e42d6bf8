"""Subcommands of ``tune``, one module each."""

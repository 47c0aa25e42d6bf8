"""Subcommands of ``tune`` that read their own arguments: one module each, with a ``main``."""

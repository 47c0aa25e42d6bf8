"""Profiles: the YAML files of ``configs/``, read with errors that name file and line."""

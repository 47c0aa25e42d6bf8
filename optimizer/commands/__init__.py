"""One module for each subcommand of ``tune``."""

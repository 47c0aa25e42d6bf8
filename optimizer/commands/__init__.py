"""One module for each ``tune NAME``: ``main(arguments) -> exit code``."""

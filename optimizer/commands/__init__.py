"""One module for each ``tune NAME`` that is not about running: ``main(arguments) -> exit code``."""

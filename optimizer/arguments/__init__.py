"""The command lines of ``tune``: flags, and the values that they take. One module a command."""

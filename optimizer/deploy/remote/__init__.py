"""The remote target: a server that runs already, left as it was."""

"""One module for each command that brings its own arguments."""

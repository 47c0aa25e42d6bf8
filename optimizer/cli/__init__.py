"""The commands: ``main(arguments)`` of the module NAME runs ``tune NAME`` and returns its exit code."""

"""The machine: its CPUs, its speed, who else is at work on it, what the server takes of it."""

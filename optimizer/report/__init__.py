"""What is shown of a run: while it goes on, at its end, and in its folder."""

LOGS = ("live", "plain", "none")

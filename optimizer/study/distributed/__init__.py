"""Trials on a Ray cluster: the driver sends candidates to workers, which deploy and measure them on the nodes."""

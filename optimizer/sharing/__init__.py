"""One study that several ``tune --join`` processes share, on one machine or many."""

"""What a run recommends, as files that production takes: one module a format."""

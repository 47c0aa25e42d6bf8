"""What ``tune report`` writes of runs: pages, Markdown, tables, plots."""

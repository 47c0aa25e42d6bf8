"""Reports of runs as HTML, Markdown, tables and plots (``tune report``)."""

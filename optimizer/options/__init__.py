"""Options of tritune."""

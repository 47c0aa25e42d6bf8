"""What a run keeps on disk, and how it is found and locked again."""

"""The files of a run: its folder, the trials table, and the Optuna study with its storage."""

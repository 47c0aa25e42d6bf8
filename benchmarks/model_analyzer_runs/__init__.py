"""Modules of ``against_model_analyzer.py``: run the peer on the same stack and measure both winners again."""

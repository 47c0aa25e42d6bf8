"""What ``against_model_analyzer.py`` needs to run the peer on the same stack and to measure both winners again."""

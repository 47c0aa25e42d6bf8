"""Import of Triton Model Analyzer's profile YAML as a profile and options of tune."""

"""The profile YAML of Triton Model Analyzer, read as a profile of tune's own and flags of its command line."""

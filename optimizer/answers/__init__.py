"""Whether a configuration's answers are right: compared with the baseline's, and scored."""

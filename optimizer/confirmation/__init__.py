"""The confirmation: tests of the best candidates on fresh servers, and comparisons with others."""

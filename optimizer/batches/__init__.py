"""Many runs as one batch: a suite, its budget shared out, an index, and the difference to the batch before."""

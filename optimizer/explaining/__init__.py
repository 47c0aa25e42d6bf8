"""Why a run ended as it did: what bounds the throughput, what would help, why the runner-up lost."""

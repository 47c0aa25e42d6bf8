"""The machine: CPUs, GPUs, fingerprint, conditions and telemetry."""

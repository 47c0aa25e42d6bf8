"""The search, the deployments and the measurements behind the ``tune`` command."""

"""The docker target: servers in containers of this machine."""

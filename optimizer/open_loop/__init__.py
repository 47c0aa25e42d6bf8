"""An open loop: requests are sent at planned times, whatever has been answered."""

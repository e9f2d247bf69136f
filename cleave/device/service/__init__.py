"""Starting `cleave join` with the machine: systemd and launchd."""

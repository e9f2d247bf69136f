"""Starting `cleave join` at boot or login: systemd and launchd."""

"""System services that start `cleave join` at boot or login, with systemd or launchd."""

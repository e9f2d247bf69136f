"""Device sessions: joining, measured speed and reputation."""

"""Device sessions: joining, measured pace, trials and reputation."""

"""The device: a pure state machine (`core`) and the executors that multiply."""

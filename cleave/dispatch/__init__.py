"""The dispatcher: a pure state machine that runs work on a fleet. Events in, commands out."""

"""Methods of training compared in closed form: conditions in, time, bytes and memory out."""

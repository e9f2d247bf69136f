"""The commands of `cleave`, one file each."""

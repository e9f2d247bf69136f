"""Scripts for people who work on Cleave; nothing of the program imports them."""

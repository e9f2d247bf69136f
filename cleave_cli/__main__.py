"""Run `cleave` as `python -m cleave_cli`."""

from cleave_cli.main import main

main()

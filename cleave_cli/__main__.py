"""Entry point of `python -m cleave_cli`, which is the same program as `cleave`."""

from cleave_cli.main import main

main()

"""`python -m cleave_cli` is `cleave`."""

from cleave_cli.main import main

main()

"""`python -m kvarn_cli`."""

from kvarn_cli.cli.app import main

main()

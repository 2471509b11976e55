"""`python -m roseinfer.server` is `roseinfer-serve`."""

from roseinfer.server.cli import main

main()

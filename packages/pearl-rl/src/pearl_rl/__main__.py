"""`python -m pearl_rl` is the command `pearl-rl`."""

from pearl_rl.cli import main

main()

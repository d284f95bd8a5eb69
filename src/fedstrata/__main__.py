"""`python -m fedstrata`."""

from fedstrata.cli import main

main()

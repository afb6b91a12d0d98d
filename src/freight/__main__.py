"""`python -m freight` is the command `freight`, also where the package runs from source."""

from freight.cli.main import main

main()

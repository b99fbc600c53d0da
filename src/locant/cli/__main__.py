"""`python -m locant.cli` is the `locant` command."""

from locant.cli import app

app()

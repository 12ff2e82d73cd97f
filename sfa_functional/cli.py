"""The ``sfa`` command."""


def main() -> None:
    """Run the command."""

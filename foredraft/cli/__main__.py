"""`python -m foredraft.cli`, for processes that start others with their own interpreter."""

from foredraft.cli import main

main()

"""`python -m packfmt.cli`: the command line without its script on the path."""

from packfmt.cli import main

if __name__ == "__main__":
    main()

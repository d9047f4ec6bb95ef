"""`python -m autoprec`: the same program as `autoprec`."""

from autoprec.cli import main

if __name__ == "__main__":
    main()

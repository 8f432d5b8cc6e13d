"""`python -m qinfer` is the command `qinfer`."""

from qinfer.cli import main

if __name__ == "__main__":
    main()

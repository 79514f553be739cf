"""`python -m moepass.cli`, for where the script `moepass` is not on the path."""

from moepass.cli.main import main

if __name__ == "__main__":
    main()

"""Reference implementations of expert parallelism in its common forms, for users and tests. May import formulas."""

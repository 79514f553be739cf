"""A segment becomes a callable: eager, Inductor, expert by expert; or a reason why not. May import kernels, system."""

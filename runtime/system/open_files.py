"""How many files this process may have open; each connection is one."""

from __future__ import annotations

import resource


def allow_many_files() -> int:
    """Open as many as the system lets this process have, and say how many these are."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return 1 << 30 if most == resource.RLIM_INFINITY else most

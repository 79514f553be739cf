"""The limit of files that this process may have open; each connection is one."""

from __future__ import annotations

import resource


def allow_many_files() -> int:
    """Raise the limit of open files as far as the system allows, and return it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return 1 << 30 if most == resource.RLIM_INFINITY else most

"""The process group that two axes of a mesh make together.

A rank of a mesh sees the ranks of its row, and those of its column. Whether these are a row and a column of one group
it can tell for itself: by the places that they have in that group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moepass.passes.ir.protocol import Group


@dataclasses.dataclass(frozen=True)
class JointGroup:
    """The group `name`, whose ranks are a grid: those of one axis that have the same place on the other are a group.

    `first` and `second` are the groups of this rank on either axis. In the order of the joint group the ranks of the
    first axis lie side by side if it `is_inner`, else those of the second.
    """

    name: str
    group: Group
    first: Group
    second: Group
    is_inner: bool

    def rank_at(self, first: int, second: int) -> int:
        """The rank in the group with these places on the axes."""
        return second * self.first.ranks + first if self.is_inner else first * self.second.ranks + second

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the group with the same place on the first axis, for each of these places."""
        return tuple(
            tuple(self.rank_at(first, second) for second in range(self.second.ranks))
            for first in range(self.first.ranks)
        )


def joint_group(first: Group, second: Group, groups: Mapping[str, Group]) -> JointGroup | None:
    """The first of `groups` that has all ranks of the grid of which this rank sees `first` and `second`."""
    for name, group in groups.items():
        if group.ranks != first.ranks * second.ranks:
            continue
        for is_inner in (False, True):
            found = JointGroup(name, group, first, second, is_inner)
            if _is_grid(found):
                return found
    return None


def _is_grid(found: JointGroup) -> bool:
    """True where the ranks of both axes have the places in the group that they have in a grid."""
    first, second, members = found.first, found.second, found.group.members
    if not (first.members and second.members and members) or len(set(members)) != len(members):
        return False
    if found.rank_at(first.rank, second.rank) != found.group.rank:
        return False
    of_first = [members[found.rank_at(place, second.rank)] for place in range(first.ranks)]
    of_second = [members[found.rank_at(first.rank, place)] for place in range(second.ranks)]
    return of_first == list(first.members) and of_second == list(second.members)

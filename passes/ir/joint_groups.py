"""The process group that two axes of a mesh form together.

A rank of a mesh sees the ranks of its row and the ranks of its column. From their positions in a third group it can
tell whether they are a row and a column of that group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moepass.passes.ir.protocol import Group


@dataclasses.dataclass(frozen=True)
class JointGroup:
    """A process group whose ranks form a grid of two axes.

    Attributes:
        name: name of the joint group
        group: the joint group as this rank sees it
        first, second: this rank's groups along the two axes
        is_inner: neighbours along the first axis are neighbours in the joint group; else neighbours along the second
    """

    name: str
    group: Group
    first: Group
    second: Group
    is_inner: bool

    def rank_at(self, first: int, second: int) -> int:
        """Return the rank in the joint group at these coordinates of the grid."""
        return second * self.first.ranks + first if self.is_inner else first * self.second.ranks + second

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Return the joint group's ranks as rows, one for each coordinate on the first axis."""
        return tuple(
            tuple(self.rank_at(first, second) for second in range(self.second.ranks))
            for first in range(self.first.ranks)
        )


def joint_group(first: Group, second: Group, groups: Mapping[str, Group]) -> JointGroup | None:
    """Return the first of `groups` whose ranks are a grid with the axes `first` and `second`, or None."""
    for name, group in groups.items():
        if group.ranks != first.ranks * second.ranks:
            continue
        for is_inner in (False, True):
            joint = JointGroup(name, group, first, second, is_inner)
            if _is_grid(joint):
                return joint
    return None


def _is_grid(joint: JointGroup) -> bool:
    """Return whether the ranks of both axes have the positions in the group that the grid requires."""
    first, second, members = joint.first, joint.second, joint.group.members
    if not (first.members and second.members and members) or len(set(members)) != len(members):
        return False
    if joint.rank_at(first.rank, second.rank) != joint.group.rank:
        return False
    row = [members[joint.rank_at(position, second.rank)] for position in range(first.ranks)]
    column = [members[joint.rank_at(first.rank, position)] for position in range(second.ranks)]
    return row == list(first.members) and column == list(second.members)

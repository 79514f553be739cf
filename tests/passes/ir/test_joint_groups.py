"""The group of two axes of a mesh together, as each of its ranks computes it."""

from __future__ import annotations

import itertools

import pytest

from moepass.passes.ir.joint_groups import joint_group
from moepass.passes.ir.protocol import Group


def _groups(members: list[tuple[int, ...]], rank: int) -> dict[str, Group]:
    return {
        f"{of_group}": Group(of_group.index(rank), len(of_group), of_group) for of_group in members if rank in of_group
    }


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize(("machines", "places"), [(2, 2), (3, 2), (2, 4), (1, 4)])
def test_rows_and_columns_of_a_group_are_found_on_every_rank(machines: int, places: int, is_inner: bool) -> None:
    world = tuple(range(10, 10 + machines * places))
    rows = [world[machine * places : (machine + 1) * places] for machine in range(machines)]
    columns = [world[column::places] for column in range(places)]
    for rank in world:
        groups = _groups([*rows, *columns, world], rank)
        row, column = (next(groups[f"{members}"] for members in of if rank in members) for of in (rows, columns))
        first, second = (row, column) if is_inner else (column, row)
        joint = joint_group(first, second, groups)
        assert joint is not None
        assert joint.group.members == world
        assert joint.rank_at(first.rank, second.rank) == joint.group.rank
        if machines > 1:
            assert joint.is_inner == is_inner
        coordinates = itertools.product(range(first.ranks), range(second.ranks))
        assert sorted(itertools.starmap(joint.rank_at, coordinates)) == list(range(len(world)))
        assert [world[member] for member in joint.rows()[first.rank]] == list(second.members)


@pytest.mark.parametrize(
    "world",
    [(0, 1, 2, 3, 4), (0, 1, 3, 2), (0, 2, 3, 1), (1, 0, 2, 3)],
)
def test_groups_that_are_no_rows_and_columns_are_not_taken(world: tuple[int, ...]) -> None:
    groups = _groups([(0, 1), (0, 2), world], 0)
    assert joint_group(groups["(0, 1)"], groups["(0, 2)"], groups) is None


def test_groups_whose_members_are_not_known_are_not_taken() -> None:
    first, second = Group(0, 2), Group(0, 2)
    assert joint_group(first, second, {"all": Group(0, 4)}) is None
    assert joint_group(first, second, {"all": Group(0, 4, (0, 1, 2, 3))}) is None

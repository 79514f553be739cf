"""The ratio of one size to another holds for all values of symbolic sizes."""

from __future__ import annotations

import sympy
from hypothesis import given
from hypothesis import strategies as st

from moepass.passes.rows.row_layout import ratio

SEQUENCES, TOKENS = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))


def _product(numbers: tuple[int, int, int]) -> sympy.Expr:
    factor, of_sequences, of_tokens = numbers
    return sympy.Integer(factor) * SEQUENCES**of_sequences * TOKENS**of_tokens


PRODUCTS = st.tuples(st.integers(1, 12), st.integers(0, 3), st.integers(0, 3)).map(_product)


@given(PRODUCTS, PRODUCTS)
def test_a_ratio_times_the_unit_is_the_whole(total: sympy.Expr, unit: sympy.Expr) -> None:
    quotient = ratio(total, unit)
    if quotient is not None:
        assert sympy.expand(quotient * unit) == total
        assert all(term.is_Integer for term in quotient.as_coefficients_dict().values())


@given(PRODUCTS, PRODUCTS)
def test_the_ratio_of_a_product_is_its_factor(first: sympy.Expr, second: sympy.Expr) -> None:
    assert ratio(sympy.expand(first * second), second) == first


@given(PRODUCTS, PRODUCTS, PRODUCTS)
def test_sums_have_no_ratio_that_they_are_not(first: sympy.Expr, second: sympy.Expr, unit: sympy.Expr) -> None:
    quotient = ratio(first + second, unit)
    assert quotient is None or sympy.expand(quotient * unit) == first + second

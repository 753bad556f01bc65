"""The evaluator of arithmetic expressions."""

from fractions import Fraction

import pytest

from vectorlm.rl.rewards.countdown import MAX_CHARACTERS, MAX_DEPTH, evaluate


@pytest.mark.parametrize(
    ("expression", "value", "numbers"),
    [
        ("7", Fraction(7), (7,)),
        ("3+8-5", Fraction(6), (3, 8, 5)),
        ("10-4-3", Fraction(3), (10, 4, 3)),
        ("2+3*4", Fraction(14), (2, 3, 4)),
        ("(2+3)*4", Fraction(20), (2, 3, 4)),
        ("24/4/2", Fraction(3), (24, 4, 2)),
        ("1/3+1/6", Fraction(1, 2), (1, 3, 1, 6)),
        (" ( 2 + 3 )\n* 4 ", Fraction(20), (2, 3, 4)),
        ("3-8", Fraction(-5), (3, 8)),
        ("007*10-00", Fraction(70), (7, 10, 0)),
    ],
)
def test_an_expression_has_its_exact_value_and_its_numbers(expression, value, numbers):
    assert evaluate(expression) == (value, list(numbers))


REFUSED = "3+ +3 -3 2**3 7//2 (3 3) () 3+5=8 3.5 x 1e3 ٣+5 2(3) (2)(3) 1_0 3,5 3#5 3+-5 )( 3*(4 True 0x1F"


@pytest.mark.parametrize("expression", ["", " ", "3 5", *REFUSED.split()])
def test_anything_else_is_refused(expression):
    with pytest.raises(ValueError, match=r"."):
        evaluate(expression)


def test_a_division_by_zero_is_refused():
    with pytest.raises(ValueError, match="divides by zero"):
        evaluate("8/(3-3)")


def test_length_is_bounded():
    longest = "1+" * ((MAX_CHARACTERS - 1) // 2) + "1"
    assert evaluate(longest)[0] == MAX_CHARACTERS // 2
    with pytest.raises(ValueError, match=f"of {MAX_CHARACTERS + 1} characters is too long"):
        evaluate("1" * (MAX_CHARACTERS + 1))


def test_depth_is_bounded_and_counts_only_what_is_open():
    assert evaluate("(" * MAX_DEPTH + "7" + ")" * MAX_DEPTH)[0] == 7
    assert evaluate("+".join(["(1)"] * (MAX_DEPTH + 1)))[0] == MAX_DEPTH + 1
    with pytest.raises(ValueError, match=f"deeper than {MAX_DEPTH}"):
        evaluate("(" * (MAX_DEPTH + 1) + "7" + ")" * (MAX_DEPTH + 1))

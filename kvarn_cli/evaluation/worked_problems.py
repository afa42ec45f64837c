"""Problems worked out line by line, made by rule: reasoning text that needs no download.

Long chains of numbers and records are what a quantized cache gets wrong first: a token misread
early is carried through every later line.
"""

import random
from collections.abc import Callable

_NAMES = ("Amara", "Bo", "Chen", "Dana", "Elif", "Femi", "Greta", "Hiro", "Ines", "Jonas")
_GOODS = ("crates", "lamps", "bricks", "books", "bottles", "chairs", "ropes", "tiles", "cables")
COLOURS = ("amber", "blue", "copper", "green", "ivory", "red", "silver", "violet", "white")
ANIMALS = ("badger", "crane", "falcon", "heron", "lynx", "marten", "otter", "raven", "stork")
_UNITS = (
    ("kilometres", "metres", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("kilograms", "grams", 1000),
    ("litres", "millilitres", 1000),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("metres", "centimetres", 100),
)


def worked_problems(count: int, seed: int = 0) -> list[str]:
    """Different problems of six kinds, each with its solution.

    Args:
        count: how many.
        seed: of the numbers and names.
    """
    draw = random.Random(seed)
    return [_KINDS[index % len(_KINDS)](draw) for index in range(count)]


def _sum_of_products(draw: random.Random) -> str:
    factors = [(draw.randint(3, 99), draw.randint(11, 99)) for _ in range(draw.randint(3, 6))]
    lines = [f"Compute {' + '.join(f'{a} * {b}' for a, b in factors)}."]
    total = 0
    for number, (a, b) in enumerate(factors, start=1):
        tens, ones = b // 10 * 10, b % 10
        lines.append(f"Product {number}: {a} * {b} = {a} * {tens} + {a} * {ones}")
        lines.append(f"  = {a * tens} + {a * ones} = {a * b}")
        lines.append(f"  Running total: {total} + {a * b} = {total + a * b}")
        total += a * b
    return _text(*lines, f"The result is {total}.")


def _stock_account(draw: random.Random) -> str:
    name, goods = draw.choice(_NAMES), draw.choice(_GOODS)
    stock = draw.randint(200, 900)
    question, answer = [f"{name} starts the week with {stock} {goods} in the store."], []
    for day in ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"):
        amount = draw.randint(5, stock // 3)
        if draw.random() < 0.5:
            question.append(f"On {day} {amount} {goods} arrive.")
            answer.append(f"{day}: {stock} + {amount} = {stock + amount}")
            stock += amount
        else:
            question.append(f"On {day} {amount} {goods} are sold.")
            answer.append(f"{day}: {stock} - {amount} = {stock - amount}")
            stock -= amount
    question.append("How many are left on Friday evening?")
    return _text(" ".join(question), *answer, f"{stock} {goods} are left.")


def _unit_conversion(draw: random.Random) -> str:
    large, small, factor = draw.choice(_UNITS)
    first, second = draw.randint(2, 60), draw.randint(2, 60)
    rest = draw.randint(1, factor - 1)
    total = (first + second) * factor + rest
    return _text(
        f"{draw.choice(_NAMES)} measures {first} {large} and {rest} {small}, then {second} {large} "
        f"more. How many {small} is that in all?",
        f"One of the {large} is {factor} {small}.",
        f"First part: {first} * {factor} = {first * factor}, and {rest} more make "
        f"{first * factor + rest} {small}.",
        f"Second part: {second} * {factor} = {second * factor} {small}.",
        f"Together: {first * factor + rest} + {second * factor} = {total} {small}.",
        f"Check: {total} = {total // factor} * {factor} + {total % factor}.",
    )


def _linear_equation(draw: random.Random) -> str:
    x = draw.randint(-20, 20)
    a, c = draw.sample([n for n in range(-9, 13) if n], 2)
    b = draw.randint(-50, 50)
    d = a * x + b - c * x
    return _text(
        f"Solve {a}x + ({b}) = {c}x + ({d}) for x.",
        f"Subtract {c}x on both sides: {a - c}x + ({b}) = {d}",
        f"Subtract ({b}) on both sides: {a - c}x = {d - b}",
        f"Divide by {a - c}: x = {d - b} / {a - c} = {x}",
        f"Check: the left side is {a} * ({x}) + ({b}) = {a * x + b}, "
        f"the right side is {c} * ({x}) + ({d}) = {c * x + d}. Both agree.",
    )


def _two_equations(draw: random.Random) -> str:
    x, y = draw.randint(1, 30), draw.randint(1, 30)
    a, b = draw.randint(2, 9), draw.randint(2, 9)
    total, weighted = x + y, a * x + (a + b) * y
    return _text(
        f"Two numbers x and y have the sum {total}, and {a}x + {a + b}y = {weighted}. Find them.",
        f"From the first equation, x = {total} - y.",
        f"Put it into the second: {a} * ({total} - y) + {a + b}y = {weighted}",
        f"  {a * total} - {a}y + {a + b}y = {weighted}",
        f"  {b}y = {weighted} - {a * total} = {weighted - a * total}",
        f"  y = {weighted - a * total} / {b} = {y}",
        f"Then x = {total} - {y} = {x}.",
        f"Check: {a} * {x} + {a + b} * {y} = {a * x} + {(a + b) * y} = {weighted}.",
    )


def _record_lookup(draw: random.Random) -> str:
    keys = draw.sample([f"{c} {a}" for c in COLOURS for a in ANIMALS], draw.randint(12, 30))
    numbers = {key: draw.randint(10_000, 99_999) for key in keys}
    lines = [f"Record {i}: the {key} has the number {numbers[key]}." for i, key in enumerate(keys)]
    asked = draw.sample(keys, 4)
    return _text(
        "Each record gives a number to a name. Read them, then answer.",
        *lines,
        *(f"Which number has the {key}? The {key} has the number {numbers[key]}." for key in asked),
    )


def _text(*lines: str) -> str:
    return "\n".join(lines)


_KINDS: tuple[Callable[[random.Random], str], ...] = (
    _sum_of_products,
    _stock_account,
    _unit_conversion,
    _linear_equation,
    _two_equations,
    _record_lookup,
)

import re

from kvarn_cli.evaluation.worked_problems import worked_problems

PROBLEMS = worked_problems(300)
_NUMBER = r"\(?-?\d+\)?"
_SIDE = rf"{_NUMBER}(?: [-+*/] {_NUMBER})*"
_CHAIN = re.compile(rf"(?<![-+*/] )(?<![\w(-]){_SIDE}(?:\s+= {_SIDE})+(?![\w)]| [-+*/])")


def test_every_line_of_arithmetic_is_right() -> None:
    chains = [match.group() for text in PROBLEMS for match in _CHAIN.finditer(text)]
    assert len(chains) > 1200
    for chain in chains:
        sides = [eval(side) for side in re.split(r"\s+= ", chain)]
        assert len(set(sides)) == 1, chain


def test_every_question_about_a_record_has_the_number_of_its_record() -> None:
    lookups = [text for text in PROBLEMS if "Record 0:" in text]
    assert len(lookups) == 50
    for text in lookups:
        records = dict(re.findall(r"Record \d+: the ([\w ]+) has the number (\d+)\.", text))
        answers = re.findall(r"\? The ([\w ]+) has the number (\d+)\.", text)
        assert len(answers) == 4
        assert all(records[name] == number for name, number in answers)


def test_problems_differ_and_follow_from_their_seed() -> None:
    assert len(set(PROBLEMS)) == 300
    assert worked_problems(300) == PROBLEMS
    assert worked_problems(10) == PROBLEMS[:10]
    assert not set(worked_problems(300, seed=1)) & set(PROBLEMS)

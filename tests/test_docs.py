import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvarn_cli.metadata import KVarNConfig

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_the_generated_pages_are_current():
    check = [sys.executable, str(ROOT / "scripts" / "write_docs.py"), "--check"]
    assert subprocess.run(check, capture_output=True, text=True, check=False).stderr == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_documented_example_of_the_metadata_is_valid():
    page = (ROOT / "docs" / "metadata.md").read_text(encoding="utf-8")
    example = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    assert KVarNConfig.from_config_dict(example).fused

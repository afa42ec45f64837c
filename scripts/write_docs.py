"""Write the generated pages of docs/: the command line's options and the JSON Schemas.

python scripts/write_docs.py            write them
python scripts/write_docs.py --check    exit with 1 if one is not current
"""

import argparse
import html
import json
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from kvarn_cli.evaluation.error_report import ErrorReport
from kvarn_cli.metadata import KVarNConfig

DOCS = Path(__file__).parents[1] / "docs"


def command_line() -> str:
    """Every command with its options, as typer documents them."""
    typer = [sys.executable, "-m", "typer", "kvarn_cli.cli.app", "utils", "docs"]
    page = subprocess.run(
        [*typer, "--name", "kvarn", "--title", "Command line"],
        check=True,
        capture_output=True,
        text=True,
    )
    return html.unescape(page.stdout).strip() + "\n"


def schema(model: type[BaseModel]) -> str:
    """JSON Schema of a document."""
    return json.dumps(model.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    pages = {
        "cli.md": command_line(),
        "kvarn_config.schema.json": schema(KVarNConfig),
        "kvarn_errors.schema.json": schema(ErrorReport),
    }
    stale = [name for name, text in pages.items() if _read(DOCS / name) != text]
    for name in stale:
        if check:
            print(f"docs/{name} is not current; run: make docs", file=sys.stderr)
        else:
            (DOCS / name).write_text(pages[name], encoding="utf-8")
            print(f"wrote docs/{name}")
    return int(check and bool(stale))


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())

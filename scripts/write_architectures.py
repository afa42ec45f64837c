"""Write docs/architectures.md: what becomes of a tiny model of every class for text.

python scripts/write_architectures.py              all of them, six minutes on one core
python scripts/write_architectures.py llama bloom  run these again, keep the other rows
"""

import sys
import tempfile
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from architecture_outcomes import outcome_of  # noqa: E402
from architecture_table import TABLE, read_rows, write_table  # noqa: E402
from architectures import MODEL_TYPES  # noqa: E402


def main() -> int:
    """Run the model types that are named, or all, and write the table."""
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or MODEL_TYPES
    rows = read_rows() if sys.argv[1:] else {}
    for number, model_type in enumerate(chosen, start=1):
        print(f"{number}/{len(chosen)} {model_type}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            rows[model_type] = outcome_of(model_type, Path(folder)).row()
    write_table(rows, transformers.__version__)
    print(f"wrote {TABLE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env bash
# The main job on a real model: convert, see the errors, generate with the cache packed.
set -euo pipefail

out=${1:-demo}
model=$(python scripts/prepare_smollm2.py)

run() {
  printf '\n$ '
  printf '%q ' "$@"
  printf '\n'
  "$@"
}

run kvarn convert "$model" --output "$out/SmolLM2-135M-Instruct-kvarn" --overwrite
run kvarn inspect-errors "$out/SmolLM2-135M-Instruct-kvarn" --num-samples 2 \
  --method kvarn:k4v2_g128 --method kvarn:k2v2_g128 --method quarot:k2v2_g128 \
  --method kivi:k2v2_g128 --report "$out/errors.html"

printf '\n$ kvarn generate %s "$(cat scripts/demo_prompt.txt)"\n' "$out/SmolLM2-135M-Instruct-kvarn"
kvarn generate "$out/SmolLM2-135M-Instruct-kvarn" "$(cat scripts/demo_prompt.txt)" \
  --max-new-tokens 60

cat <<TEXT

Done. What to do next:
  look at   $out/errors.html
  convert   .venv/bin/kvarn convert ORG/MODEL --output DIR      a model of yours; --dry-run shows the plan
  compare   .venv/bin/kvarn inspect-errors ORG/MODEL --method kvarn:k2v2_g128 --method kivi:k2v2_g128
  publish   .venv/bin/kvarn push-to-hub DIR ORG/NAME --private
TEXT

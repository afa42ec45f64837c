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
run kvarn inspect-errors "$out/SmolLM2-135M-Instruct-kvarn" \
  --num-samples 2 --figure "$out/errors.png"

question="Summarize this licence in one sentence: $(head -c 2600 LICENSE)"
printf '\n$ kvarn generate %s "Summarize this licence in one sentence: …"\n' \
  "$out/SmolLM2-135M-Instruct-kvarn"
kvarn generate "$out/SmolLM2-135M-Instruct-kvarn" "$question" --max-new-tokens 60

cat <<TEXT

Done. What to do next:
  look at   $out/errors.png
  convert   kvarn convert ORG/MODEL --output DIR      a model of yours; --dry-run shows the plan
  compare   kvarn inspect-errors ORG/MODEL --method kvarn:k2v2_g128 --method kivi:k2v2_g128
  publish   kvarn push-to-hub DIR ORG/NAME --private
TEXT

#!/usr/bin/env bash
# From a bare node to an answer: does DIFF V2 have a lower loss than its Transformer on the same tokens?
#   examples/speedrun/speedrun.sh TEXTS HELD_OUT [KEY=VALUE ...]
# TEXTS is a folder of Parquet or JSONL files with a field text, HELD_OUT such a file outside of it. Run the
# same command again after an interruption: each step resumes or finds that nothing is left to do.
# RANKS sets the number of ranks (default: one per GPU). KEY=VALUE changes the recipe of both models.
set -euo pipefail
texts=${1:?the first argument is a folder of texts}
held_out=${2:?the second argument is a file of held-out text}
overrides=("${@:3}")
here="$(cd "$(dirname "$0")" && pwd)"
runs=runs/speedrun
mkdir -p "$runs"

# 1. A byte-level BPE tokenizer of TOKENS tokens, from the first documents of the texts.
[ -e "$runs/tokenizer/tokenizer_config.json" ] ||
  python "$here/train_tokenizer.py" "$texts" "$runs/tokenizer" "${TOKENS:-49152}"

# 2. The corpus.
diffmegatron prepare "$texts" --output "$runs/corpus" --tokenizer "$runs/tokenizer" --workers "${WORKERS:-16}"

# 3. Both models. launch/torchrun.sh restarts them after a crash.
for model in diff_v2 transformer; do
  baseline=$([ "$model" = transformer ] && echo true || echo false)
  "$here/../../launch/torchrun.sh" "$here/recipe.yaml" "run_dir=$runs/$model" "model.baseline=$baseline" \
    "${overrides[@]}"
done

# 4. The report, which begins with the conclusion, and the runs side by side.
evaluation=(--suite loss,needle-attention --data "$held_out" --haystack "$held_out")
diffmegatron evaluate "$runs/transformer" "$runs/diff_v2" "${evaluation[@]}" --out "$runs/report" \
  --set "needle-attention.length=${LENGTH:-2048}"
diffmegatron compare "$runs/transformer" "$runs/diff_v2" --out "$runs/compared"

# 5. The exports, and a text.
for model in diff_v2 transformer; do
  [ -e "$runs/${model}_hf" ] || diffmegatron export "$runs/$model" "$runs/${model}_hf"
done
diffmegatron generate "$runs/diff_v2_hf" 'The history of' --max-tokens 64
echo "read $runs/report/report.html and $runs/compared/compare.md"

# 6. A server of DIFF V2 until Ctrl-C, if vLLM is installed.
if command -v vllm >/dev/null; then
  exec vllm serve "$runs/diff_v2_hf" --trust-remote-code
fi

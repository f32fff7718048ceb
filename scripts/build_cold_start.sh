#!/usr/bin/env bash
# Builds the shipped cold-start adapter: demonstrations from the scripted policies, then `selfgc-rl sft`, twice: a first
# pass at a high rate that teaches the calls, a second at a lower one, from other seeds, that removes slips (about an
# hour and a half on two idle cores; the same command goes on after an interruption). The result takes the place of the
# shipped adapter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pass() { # NAME START-ADAPTER OVERRIDE...
  local run="runs/cold_start/$1" resume=()
  [ -d "$run" ] && resume=(--resume)
  [ -f "$run/training_log.json" ] || .venv/bin/selfgc-rl sft --run "$run" "${resume[@]}" model.adapter="$2" "${@:3}" \
    sft.checkpoint_every=6 sft.evaluate_every=24 train.token_budget=4096
}

mkdir -p runs/cold_start
pass first null sft.episodes=364 sft.learning_rate=1e-3 sft.warmup_steps=10 sft.adapter_dtype=float32
pass second runs/cold_start/first/adapter sft.episodes=288 sft.learning_rate=6e-4 sft.warmup_steps=4 sft.seed=11

run=runs/cold_start/second
target=selfgc_rl/data/cold_start
cp "$run"/adapter/{adapter_config.json,adapter_model.safetensors,SHA256SUMS} "$target"/
cp "$run"/metrics.jsonl "$target"/training.jsonl
echo "new adapter in $target; update TRAINING.md there, then evaluate it before committing"

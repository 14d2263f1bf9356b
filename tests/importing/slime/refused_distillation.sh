python3 train.py --use-opd --opd-type sglang --opd-kl-coef 1.0 --rm-url http://teacher:1 --hf-checkpoint /m --prompt-data /d.jsonl --num-rollout 3

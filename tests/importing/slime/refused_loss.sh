python3 train.py --hf-checkpoint /models/m --loss-type custom_loss --num-rollout 1

#!/bin/bash
# The train.py of the slime checkout we stand in, on one GPU. LAB holds the model; EST and MORE choose the algorithm,
# DATA what is sampled for. With SUBMIT a cluster is started and the training submitted to it, as slime's scripts do.
set -e
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 WANDB_MODE=disabled
export CUDA_DEVICE_MAX_CONNECTIONS=1 RAY_DEDUP_LOGS=0 RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled
MODEL_ARGS=(
   --swiglu --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
   --group-query-attention --num-query-groups 2 --use-rotary-position-embeddings --disable-bias-linear
   --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 1024 --kv-channels 64 --qk-layernorm
)
RUN=(exec)
if [ -n "$SUBMIT" ]; then
   ray stop --force > /dev/null
   ray start --head --node-ip-address 127.0.0.1 --num-gpus 1 --disable-usage-stats --dashboard-port=8265
   RUN=(ray job submit --address=http://127.0.0.1:8265
      --runtime-env-json='{"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}' --)
fi
"${RUN[@]}" python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node 1 \
   "${MODEL_ARGS[@]}" \
   --hf-checkpoint "$LAB/tiny-qwen3" --ref-load "$LAB/tiny-qwen3" \
   --num-rollout 10 --rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16 \
   --rollout-max-response-len 64 --rollout-temperature 1 --rm-type math ${DATA:---disable-rollout-global-dataset} \
   --advantage-estimator "${EST:-grpo}" --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0.01 \
   --optimizer adam --lr 1e-4 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 \
   --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 \
   --use-dynamic-batch-size --max-tokens-per-gpu 512 --no-gradient-accumulation-fusion \
   $MORE "$@"

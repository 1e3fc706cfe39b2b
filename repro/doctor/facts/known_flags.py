"""Flags that slime, Miles and the scripts that come with them use: what a misspelt one is compared with."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.launches.system import flag_names

__all__ = ["ALSO", "KNOWN", "near_miss", "twin"]


KNOWN = flag_names("""
accumulate-allreduce-grads-in-fp32 actor-num-gpus-per-node actor-num-nodes adam-beta1 adam-beta2 add-qkv-bias
advantage-estimator allgather-cp allow-partial-train-step apply-chat-template apply-chat-template-kwargs
apply-layernorm-1p assistant-text-threshold async-data-buffer-capacity-factor async-max-concurrent-samples
async-save async-unused-samples-handler attention-backend attention-dropout attention-output-gate
attention-softmax-in-fp32 attn-implementation balance-by-flops balance-data bf16 buffer-filter-path cache-dir
calculate-per-token-loss chat-template-path check-lora-weight-equal check-rematerialize-param-from-master-weight
check-weight-update-allow-quant-error check-weight-update-equal check-weight-update-selector
check-weight-update-skip-list ci-check-model-hash ci-disable-kl-checker ci-disable-logprobs-checker
ci-disable-weight-update-checker ci-ft-test-actions ci-inject-rollout-data-min-match-ratio
ci-inject-rollout-data-path ci-inject-rollout-data-start-rollout-id ci-load-grad-norm ci-metric-checker-key
ci-metric-checker-threshold ci-save-grad-norm ci-save-model-hash ci-test ci-train-rollout-logprob-abs-diff-threshold
ckpt-step clip-grad colocate config context-parallel-size control-server-port critic-load critic-lr
critic-lr-warmup-iters critic-num-gpus-per-node critic-num-nodes critic-save custom-advantage-function-path
custom-agent-function-path custom-async-data-buffer-path custom-config-path
custom-convert-samples-to-train-data-path custom-eval-rollout-log-function-path custom-generate-function-path
custom-loss-function-path custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path
custom-megatron-init-path custom-megatron-post-save-hook-path custom-model-provider-path
custom-pg-loss-reducer-function-path custom-reward-post-process-path custom-rm-path custom-rollout-log-function-path
custom-tis-function-path custom-update-weight-post-write-path dashboard-flush-interval dashboard-forward-prometheus
dashboard-gpu-sample-interval dashboard-sglang-metrics dashboard-sglang-scrape-interval dashboard-sglang-scrape-mode
data-pad-size-multiplier data-source-path debug-deterministic-collective debug-disable-optimizer
debug-exit-after-rollout debug-rollout-only debug-skip-weight-update debug-train-only
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers delay-split-train-data-by-dp demo
deterministic-mode disable-bias-linear disable-compute-advantages-and-returns disable-grpo-std-normalization
disable-rewards-normalization disable-rollout-global-dataset disable-rollout-trim-samples
disable-wandb-random-suffix distributed-backend distributed-timeout-minutes dp-replicate-size dsa-attention-backend
dump-details dumper-dir dumper-enable dumper-fwd-bwd dumper-fwd-only dumper-inference
dumper-source-patcher-config-inference dumper-source-patcher-config-train dynamic-sampling-filter-path
enable-event-analyzer enable-experimental enable-mtp-training enable-witness entropy-coef env-report eps-clip
eps-clip-c eps-clip-high eval-config eval-function-path eval-hf-dir eval-input-key eval-interval eval-keep-snapshots
eval-label-key eval-max-context-len eval-max-in-flight eval-max-prompt-len eval-max-response-len eval-min-new-tokens
eval-num-gpus eval-num-gpus-per-engine eval-overflow-policy eval-prompt-data eval-reward-key eval-temperature
eval-tool-key eval-top-k eval-top-p exclude-modules exp-avg-dtype exp-avg-sq-dtype expert-model-parallel-size
expert-tensor-parallel-size experts-shared-outer-loras extra-high-precision-layers-hf
extra-high-precision-layers-megatron fetch-trajectory-retry-times ffn-hidden-size filter-zero-reward-samples
finetune first-last-layers-bf16 follow fp4-format fp4-recipe fp8-format fp8-param-gather fp8-recipe
freeze-e-score-correction-bias freeze-indexer freeze-params-name-list ft-components fully-async gamma
generate-execute-tool-function-path generate-max-turns generate-tool-call-parser generate-tool-specs-path
get-mismatch-metrics global-batch-size grad-reduce-in-bf16 gradient-checkpointing group-query-attention group-rm
hf-checkpoint hidden-dropout hidden-size host http-proxy indep-dp input-key keep-old-actor kl-coef kl-loss-coef
kl-loss-type kv-channels kv-lora-rank label-key lambd linear-attention-backend load load-debug-rollout-data
load-debug-rollout-data-subsample load-forge-rollout-data log-correct-samples log-multi-turn log-passrate
log-probs-chunk-size log-probs-max-tokens-per-gpu log-reward-category lora-adapter-path lora-alpha
lora-base-cpu-backup lora-dropout lora-rank lora-sync-from-tensor lora-train-only lora-type loss-mask-type loss-type
low-memory-resume low-mfu-threshold lr lr-decay-style lr-warmup-fraction main-params-dtype
make-vocab-size-divisible-by mask-offpolicy-in-partial-rollout max-position-embeddings max-seq-len
max-tokens-per-gpu max-weight-staleness megatron-config-path megatron-deepgemm-forward-layers
megatron-deepgemm-forward-modules megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules
megatron-server-max-length megatron-server-update-timeout-s megatron-server-warmup megatron-to-hf-mode
memory-recorder memory-snapshot-dir memory-snapshot-num-steps metadata-key mfu-peak-tflops micro-batch-size
miles-dsa-topk-backend miles-router-health-check-failure-threshold miles-router-max-connections miles-router-timeout
min-batch-collection-ratio min-lr mini-ft-controller-enable mini-ft-controller-poll-interval
mini-ft-controller-resume-delay mlflow-experiment-name mlflow-run-id mlflow-run-name mlflow-tracking-uri model-name
moe-aux-loss-coeff moe-enable-deepep moe-ffn-hidden-size moe-flex-dispatcher-backend moe-grouped-gemm moe-layer-freq
moe-permute-fusion moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias moe-router-freeze-gate
moe-router-group-topk moe-router-load-balancing-type moe-router-num-groups moe-router-pre-softmax
moe-router-score-function moe-router-topk moe-router-topk-scaling-factor moe-shared-expert-gate
moe-shared-expert-intermediate-size moe-token-dispatcher-type moe-token-drop-policy mooncake-replica-num
mooncake-store-init-kwargs mscale mscale-all-dim mtp-loss-scaling-factor mtp-num-layers multi-latent-attention
multi-lora-adapter multi-lora-api-port multi-lora-backend-path multi-lora-disable-service-mode
multi-lora-http-server-path multi-lora-idle-poll-s multi-lora-max-adapter-global-batch-size
multi-lora-max-coalesce-wait-s multi-lora-max-empty-wait-s multi-lora-n-adapters multimodal-keys
n-samples-per-eval-prompt n-samples-per-prompt no-bias-dropout-fusion no-check-for-nan-in-loss-and-grad
no-gradient-accumulation-fusion no-load-optim no-load-rng no-masked-softmax-fusion no-offload-rollout
no-offload-train no-position-embedding no-rope-fusion no-save-optim no-sglang-lora-use-virtual-experts norm-epsilon
normalization normalize-advantages num-attention-heads num-critic-only-steps num-epoch num-experts num-gpus-per-node
num-layers num-layers-at-end-in-bf16 num-layers-at-start-in-bf16 num-query-groups num-rollout num-steps-per-rollout
object-store-backend observe-training-entropy offload offload-rollout offload-rollout-level offload-train
offload-train-disk-chunk-mb offload-train-disk-dir offload-train-target only-train-params-name-list opd-kl-coef
opd-log-prob-top-k opd-reward-weight-mode opd-teacher-ckpt-step opd-teacher-key opd-teacher-load opd-teacher-urls
opd-top-k-strategy opd-topk-per-position opd-type opsm-delta optimizer optimizer-cpu-offload
optimizer-offload-fraction over-sampling-batch-size overlap-cpu-optimizer-d2h-h2d p2p-transfer-num-workers
p2p-transfer-timeout padded-vocab-size partial-rollout pause-generation-mode pin-rollout-manager-to-head
pipeline-model-parallel-size port position-embedding-type post-mlp-layernorm post-self-attn-layernorm
prefill-num-servers profile-target prometheus-port prometheus-run-name prompt-data q-lora-rank qk-head-dim
qk-layernorm qk-pos-emb-head-dim qkv-format qwen-gdn-backend recompute-granularity recompute-logprobs-via-prefill
recompute-loss-function recompute-method recompute-num-layers record-memory-history ref-ckpt-step ref-load
ref-micro-batch-size ref-update-interval release-train rematerialize-param-from-master-weight reset-optimizer-states
reward-key rm-type rm-url rollout-all-samples-process-path rollout-batch-size rollout-buffer-url
rollout-data-postprocess-path rollout-data-transport rollout-external rollout-external-engine-addrs
rollout-function-path rollout-health-check-first-wait rollout-health-check-interval rollout-health-check-timeout
rollout-max-context-len rollout-max-prompt-len rollout-max-response-len rollout-num-gpus rollout-num-gpus-per-engine
rollout-sample-filter-path rollout-sample-hook-path rollout-seed rollout-shuffle rollout-skip-special-tokens
rollout-stop rollout-stop-token-ids rollout-submission-granularity rollout-task-type rollout-temperature
rollout-top-k rollout-top-p rotary-base rotary-interleaved rotary-percent rotary-scaling-factor
router-assignment-mode router-decode-policy router-health-check-interval-secs router-health-failure-threshold
router-health-success-threshold router-policy router-prefill-policy save save-debug-event-data
save-debug-rollout-data save-debug-train-data save-debug-trajectory-data save-hf save-interval
save-local-weight-checksum save-retain-interval save-trigger-sentinel seed seq-length sequence-parallel
session-message-matcher session-sample-picker-path session-sample-postprocessor-path session-server-ip
session-server-port session-verify-cycles sglang-attention-backend sglang-chunked-prefill-size sglang-config
sglang-context-length sglang-cuda-graph-bs sglang-cuda-graph-max-bs sglang-data-parallel-size
sglang-decode-log-interval sglang-deepep-mode sglang-disable-cuda-graph sglang-disable-custom-all-reduce
sglang-disable-overlap-schedule sglang-disable-piecewise-cuda-graph sglang-disable-radix-cache
sglang-disable-shared-experts-fusion sglang-disaggregation-ib-device sglang-disaggregation-transfer-backend
sglang-dp-size sglang-dsa-decode-backend sglang-dsa-prefill-backend sglang-dsa-topk-backend sglang-dtype
sglang-enable-deterministic-inference sglang-enable-dp-attention sglang-enable-dp-lm-head
sglang-enable-draft-weights-cpu-backup sglang-enable-metrics sglang-enable-multimodal sglang-ep-size
sglang-expert-parallel-size sglang-flashinfer-mla-disable-ragged sglang-fp8-gemm-backend sglang-host
sglang-kv-cache-dtype sglang-lora-backend sglang-lora-use-virtual-experts sglang-mamba-scheduler-strategy
sglang-max-lora-rank sglang-max-loras-per-batch sglang-max-mamba-cache-size sglang-max-running-requests
sglang-max-total-tokens sglang-mem-fraction-static sglang-model-loader-extra-config sglang-moe-a2a-backend
sglang-moe-dense-tp-size sglang-moe-runner-backend sglang-nsa-decode-backend sglang-nsa-prefill-backend
sglang-page-size sglang-pipeline-parallel-size sglang-port sglang-pp-size sglang-reasoning-parser
sglang-remote-instance-weight-loader-ib-device sglang-remote-instance-weight-loader-start-seed-via-transfer-engine
sglang-rl-on-policy-target sglang-router-ip sglang-router-policy sglang-router-port
sglang-router-request-timeout-secs sglang-server-concurrency sglang-speculative-algorithm
sglang-speculative-draft-attention-backend sglang-speculative-eagle-topk sglang-speculative-num-draft-tokens
sglang-speculative-num-steps sglang-tokenizer-path sglang-tool-call-parser sglang-tp-size
sglang-true-on-policy-contract sglang-watchdog-timeout skip-actor-forward-only skip-eval-before-train spec
start-rollout-id stream-optimizer-state-moment-dtype stream-optimizer-state-to-disk swiglu target-modules
tb-experiment-name tb-project-name te-precision-config-file teacher-label-reduction-chunk-size teacher-port
teacher-sample-reduction-chunk-size teacher-warmup-port teacher-warmup-timeout-s tensor-lru
tensor-model-parallel-size tis-clip tis-clip-low tito-model tokenizer-name tool-call-failure-mode tool-key
train-backend train-env-vars train-memory-margin-bytes transformer-impl true-on-policy-mode
untie-embeddings-and-output-weights update-weight-buffer-size update-weight-delta-checksum
update-weight-delta-encoding update-weight-disk-dir update-weight-disk-keep-files update-weight-local-checkpoint-dir
update-weight-mode update-weight-transfer-mode update-weight-transport update-weights-interval
use-distributed-optimizer use-distributed-post use-dynamic-batch-size use-dynamic-global-batch-size
use-fault-tolerance use-gated-attention use-indexer-replay use-kl-loss use-miles-dashboard use-miles-router
use-mlflow use-opd use-opsm use-precision-aware-optimizer use-prometheus use-rollout-entropy
use-rollout-indexer-replay use-rollout-logprobs use-rollout-routing-replay use-rotary-position-embeddings
use-routing-replay use-session-server use-stateless-adam use-tensorboard use-tis use-unbiased-kl
use-utilization-overview use-wandb v-head-dim value-clip verbose vocab-size wandb-always-use-train-step wandb-dir
wandb-group wandb-host wandb-key wandb-mode wandb-project wandb-run-id wandb-team weight-decay witness-buffer-size
""")
"""Registered by THUDM/slime@624b824a8 and radixark/miles@31f1ca961 (``add_argument``), or given in their scripts."""

ALSO = flag_names("""
fp4-param-gather no-ffn-hidden-size sglang-report
""")
"""Flags of Megatron-LM and SGLang that look like a misspelling of one of `KNOWN` and are none."""


# -- flags that are nearly another one: a typing mistake


def near_miss(flag: str, known: Iterable[str]) -> str:
    """The flag that was probably meant.

    Args:
        flag: One that is not known, with its dashes.
        known: Those that there are.

    Returns:
        The known flag that differs by underscores for dashes, a letter or two, or the order of its words; '' where
        none is that near.
    """
    plain = flag.lower().replace("_", "-")
    parts = sorted(plain.split("-"))
    best, least = "", 3 if len(plain) >= 14 else 2
    for candidate in known:
        if candidate == plain or (sorted(candidate.split("-")) == parts and len(parts) > 3):
            return candidate
        if abs(len(candidate) - len(plain)) < least and (distance := _distance(plain, candidate, least)) < least:
            best, least = candidate, distance
    return best


def _distance(a: str, b: str, limit: int) -> int:
    """Letters to insert, drop, change or swap; `limit` where it is that or more."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        earlier, before = before, row
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
        if min(row) >= limit:
            return limit
    return min(row[-1], limit)


def twin(flag: str) -> str:
    """``--x`` for ``--no-x`` and the other way round: parsers of Python have both."""
    return f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"

"""Names of the metrics that learners report and that other modules read."""

STALL, EXCHANGE_P95, LOSS, EVAL_LOSS = "diloco/stall_s", "diloco/exchange_p95_s", "loss", "eval_loss"


TRAINER_STEP = "diloco/trainer_step"  # continues over restarts of a learner


COUNTS_TOKENS = "diloco/counts_tokens"  # 1: tokens of a language model; 0: samples

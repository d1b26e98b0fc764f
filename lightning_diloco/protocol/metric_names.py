"""Names of the figures that learners report and that several programs read."""

STALL, EXCHANGE_P95, LOSS, EVAL_LOSS = "diloco/stall_s", "diloco/exchange_p95_s", "loss", "eval_loss"


TRAINER_STEP = "diloco/trainer_step"  # goes on where a learner that is started again does


COUNTS_TOKENS = "diloco/counts_tokens"  # 1: of a language model, as far as is known; 0: samples

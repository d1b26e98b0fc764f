"""Names of metrics: those that learners report, and the losses that modules of users log."""

STALL, EXCHANGE_P95, LOSS, EVAL_LOSS = "diloco/stall_s", "diloco/exchange_p95_s", "loss", "eval_loss"
TRAINER_STEP = "diloco/trainer_step"  # continues over restarts of a learner
RANK_BYTES = "diloco/rank_bytes"  # of memory that exchanging takes, on the rank that needs the most
COUNTS_TOKENS = "diloco/counts_tokens"  # 1: tokens of a language model; 0: samples

# The first of these that is logged is shown.
TRAIN_LOSSES = ("train/loss", "train_loss", "train_loss_step", "loss")
VAL_LOSSES = ("val/loss", "val_loss", "eval/loss")

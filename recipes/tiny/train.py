"""An ordinary training script with its own module and loader, and one import that registers the strategy.

python recipes/tiny/train.py --strategy auto                     a plain Trainer
python recipes/tiny/train.py --strategy decoupled_diloco         a learner, with a syncer of its own
diloco run recipes/tiny/train.py --local 2                       two learners and a syncer
"""

import argparse
import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_diloco  # noqa: F401  registers "decoupled_diloco"

SEQ_LEN = 128
NUM_BYTES = 256


class Bytes(Dataset):
    """Windows of SEQ_LEN bytes over text files."""

    def __init__(self, files: list[Path]) -> None:
        joined = b"".join(file.read_bytes() for file in files)
        self.windows = torch.frombuffer(bytearray(joined), dtype=torch.uint8)[: len(joined) // SEQ_LEN * SEQ_LEN]
        self.windows = self.windows.view(-1, SEQ_LEN)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.windows[index].long()


class ByteGPT(L.LightningModule):
    """A small GPT-2 over bytes."""

    def __init__(self, lr: float = 2e-3) -> None:
        super().__init__()
        self.lr = lr
        config = GPT2Config(vocab_size=NUM_BYTES, n_positions=SEQ_LEN, n_embd=128, n_layer=2, n_head=4,
                            bos_token_id=0, eos_token_id=0)  # fmt: skip
        self.model = GPT2LMHeadModel(config)
        self.model.loss_type = "ForCausalLM"

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="decoupled_diloco")
    parser.add_argument("--max-steps", type=int, default=300)
    args = parser.parse_args()

    L.seed_everything(1)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    train = DataLoader(Bytes(files[:-8]), batch_size=16, shuffle=True, drop_last=True)
    val = DataLoader(Bytes(files[-8:]), batch_size=16)

    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=1,
        max_steps=args.max_steps,
        val_check_interval=100,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
    )
    trainer.fit(ByteGPT(), train, val)


if __name__ == "__main__":
    main()

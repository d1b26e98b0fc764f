"""A small video diffusion transformer and generated clips, in ordinary Lightning code that names no strategy.

The model learns the velocity from clip to noise (rectified flow, arXiv 2209.03003). It is a transformer over patches of
space and time, whose layers are modulated by the noise time (DiT, arXiv 2212.09748).
"""

import math

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

FRAMES, SIZE = 8, 16


class MovingDots(Dataset):
    """Clips of a bright dot that flies straight and bounces off the edges, float32 (FRAMES, SIZE, SIZE) in -1..1.

    Clip number k is always the same; nothing is stored or downloaded.
    """

    def __init__(self, num_clips: int, first: int = 0) -> None:
        self.num_clips, self.first = num_clips, first

    def __len__(self) -> int:
        return self.num_clips

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.first + index)
        start, speed = torch.rand(2, 2, generator=generator)
        way = start + (2 * speed - 1) * 1.2 * torch.linspace(0, 1, FRAMES).unsqueeze(1)  # (FRAMES, 2)
        inside = 1 - (way % 2 - 1).abs()  # reflected into 0..1
        y, x = ((SIZE - 1) * inside).unbind(1)
        grid = torch.arange(SIZE)
        square = (grid - y.view(-1, 1)).square().unsqueeze(2) + (grid - x.view(-1, 1)).square().unsqueeze(1)
        return 2 * torch.exp(-square / 4) - 1


class Clips(L.LightningDataModule):
    """Training and validation clips, which do not overlap.

    Args:
        num_clips: number of training clips.
        num_val_clips: number of validation clips.
        batch_size: clips per step.
    """

    def __init__(self, num_clips: int = 20_000, num_val_clips: int = 128, batch_size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        clips = MovingDots(self.hparams.num_clips, first=self.hparams.num_val_clips)
        return DataLoader(clips, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(MovingDots(self.hparams.num_val_clips), self.hparams.batch_size)


class Block(nn.Module):
    """Attention over all patches, then an MLP; the noise time shifts, scales and gates both."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)  # every block begins as the identity
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(time)).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate1 * self.attend(self.norm(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.merge(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VideoDiT(L.LightningModule):
    """A diffusion transformer over clips (batch, FRAMES, SIZE, SIZE). Logs `train/loss` and `val/loss`.

    Args:
        width: width of the transformer.
        num_layers: number of blocks.
        num_heads: heads of each attention layer.
        patch: (frames, rows, columns) of one token.
        lr: learning rate of AdamW.
    """

    def __init__(
        self,
        width: int = 64,
        num_layers: int = 3,
        num_heads: int = 4,
        patch: tuple[int, int, int] = (2, 4, 4),
        lr: float = 2e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.patch = tuple(patch)
        self.grid = tuple(whole // part for whole, part in zip((FRAMES, SIZE, SIZE), self.patch, strict=True))
        self.embed = nn.Linear(math.prod(self.patch), width)
        self.position = nn.Parameter(0.02 * torch.randn(math.prod(self.grid), width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, math.prod(self.patch))

    def forward(self, clips: Tensor, times: Tensor) -> Tensor:
        """Return the velocity at noisy clips; times (batch,) are in 0..1, 1 is pure noise."""
        x = self.embed(self.to_patches(clips)) + self.position
        time = self.time(self.waves(times))
        for block in self.blocks:
            x = block(x, time)
        return self.to_clips(self.head(self.norm(x)))

    def to_patches(self, clips: Tensor) -> Tensor:
        for dim, (count, part) in enumerate(zip(self.grid, self.patch, strict=True)):
            clips = clips.unflatten(1 + 2 * dim, (count, part))
        return clips.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(1, 3)

    def to_clips(self, patches: Tensor) -> Tensor:
        cut = patches.unflatten(2, self.patch).unflatten(1, self.grid).permute(0, 1, 4, 2, 5, 3, 6)
        return cut.reshape(-1, FRAMES, SIZE, SIZE)

    def waves(self, times: Tensor) -> Tensor:
        half = self.hparams.width // 2
        speeds = torch.logspace(0, 3, half, device=times.device)
        return torch.cat([(times.unsqueeze(1) * speeds).sin(), (times.unsqueeze(1) * speeds).cos()], dim=1)

    def loss(self, clips: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        at = times.view(-1, 1, 1, 1)
        return F.mse_loss(self((1 - at) * clips + at * noise, times), noise - clips)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch, torch.rand(len(batch), device=batch.device), torch.randn_like(batch))
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        generator = torch.Generator().manual_seed(batch_idx)  # the same noise each time
        noise = torch.randn(batch.shape, generator=generator).to(batch)
        times = torch.linspace(0, 1, len(batch), device=batch.device)
        self.log("val/loss", self.loss(batch, times, noise), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)

    @torch.no_grad()
    def sample(self, num_clips: int, num_steps: int = 32) -> Tensor:
        """Draw new clips from noise, (num_clips, FRAMES, SIZE, SIZE)."""
        clips = torch.randn(num_clips, FRAMES, SIZE, SIZE, device=self.device)
        for step in range(num_steps, 0, -1):
            clips = clips - self(clips, torch.full((num_clips,), step / num_steps, device=self.device)) / num_steps
        return clips

"""A small convolutional network for digits of 8 × 8 pixels."""

from __future__ import annotations

from torch import Tensor, nn

SIZE = 8
CLASSES = 10


class Digits(nn.Module):
    """(samples, 1, 8, 8) pixels of 0 to 1 → (samples, 10) logits."""

    def __init__(self, channels: int, hidden: int, dropout: float, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *_convolution(1, channels, batch_norm=batch_norm),
            *_convolution(channels, 2 * channels, batch_norm=batch_norm),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(2 * channels * (SIZE // 2) ** 2, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.convolutions(images))
        return logits


def _convolution(channels: int, more: int, *, batch_norm: bool) -> list[nn.Module]:
    norm = [nn.BatchNorm2d(more)] if batch_norm else []
    return [nn.Conv2d(channels, more, 3, padding=1), *norm, nn.ReLU()]

"""A small convolutional network for digits of 8 × 8 pixels."""

from __future__ import annotations

from torch import Tensor, nn

SIZE = 8
CLASSES = 10


class Digits(nn.Module):
    """(samples, 1, 8, 8) pixels of 0 to 1 → (samples, 10) logits."""

    def __init__(self, channels: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
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

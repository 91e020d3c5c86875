"""Store what a federation's server reports: a row per round, a row per client, and how the data are divided."""

from __future__ import annotations

from django.db import models

from jobs.client_name import client_name
from jobs.models.attempt import Attempt, Event
from jobs.models.job import Job
from training.federation.tables import NAME_CHARACTERS


class Round(models.Model):
    """A round of one attempt, as its newest incarnation did it.

    Counts are totals; `named` has the clients by name.
    """

    attempt = models.ForeignKey(Attempt, models.CASCADE, related_name="rounds", db_index=False)
    number = models.PositiveIntegerField()
    incarnation = models.PositiveIntegerField()
    told_at = models.DateTimeField()
    trained = models.PositiveIntegerField()
    late = models.PositiveIntegerField()
    dropped = models.PositiveIntegerField()
    rejected = models.PositiveIntegerField()
    broken = models.PositiveIntegerField(help_text="Number of clients whose updates were not finite.")
    seconds = models.FloatField(null=True)
    bytes_up = models.BigIntegerField()
    bytes_down = models.BigIntegerField()
    loss = models.FloatField(null=True)
    accuracy = models.FloatField(null=True, help_text="Accuracy of the global model; null: no validation.")
    worst = models.PositiveIntegerField(null=True, help_text="The client with the lowest accuracy.")
    named = models.BinaryField(help_text="Clients whose activity the server reported, packed by jobs.rounds.")

    class Meta:
        constraints = (models.UniqueConstraint(fields=["attempt", "number"], name="one_row_a_round"),)

    def __str__(self) -> str:
        return f"round {self.number}"

    @property
    def counted(self) -> int:
        """Return the number of clients whose updates counted."""
        return self.trained + self.late

    @property
    def out(self) -> int:
        """Return the number of clients whose updates arrived and did not count."""
        return self.rejected + self.broken

    @property
    def requested(self) -> int:
        return self.counted + self.dropped + self.rejected + self.broken


class Client(models.Model):
    """A federation's client: what it did whenever it was named, repeated rounds included."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="clients", db_index=False)
    number = models.PositiveIntegerField()
    name = models.CharField(max_length=NAME_CHARACTERS, default="", db_default="", help_text="Owner of its data.")
    samples = models.PositiveIntegerField(null=True, help_text="Number of training samples.")
    evaluation_samples = models.PositiveIntegerField(null=True, help_text="Number of evaluation samples.")
    trained = models.PositiveIntegerField(default=0)
    late = models.PositiveIntegerField(default=0)
    dropped = models.PositiveIntegerField(default=0)
    rejected = models.PositiveIntegerField(default=0)
    broken = models.PositiveIntegerField(default=0)
    timed = models.PositiveIntegerField(default=0, help_text="Number of rounds whose duration was reported.")
    seconds_sum = models.FloatField(default=0.0, help_text="Sum of the durations.")
    loss = models.FloatField(null=True, help_text="Loss when it last trained.")
    accuracy = models.FloatField(null=True, help_text="Accuracy on its samples when it last took part.")
    last_attempt = models.PositiveIntegerField(default=0)
    last_round = models.PositiveIntegerField(default=0, help_text="0: it has never taken part.")

    class Meta:
        constraints = (models.UniqueConstraint(fields=["job", "number"], name="one_row_a_client"),)

    def __str__(self) -> str:
        return client_name(self.number, self.name)

    @property
    def seconds(self) -> float | None:
        """Return the mean duration of its rounds."""
        return self.seconds_sum / self.timed if self.timed else None

    @property
    def out(self) -> int:
        """Return how often its update arrived and did not count."""
        return self.rejected + self.broken

    @property
    def requested(self) -> int:
        return self.trained + self.late + self.dropped + self.rejected + self.broken


class ClientSplit(models.Model):
    """The data of neighbouring clients by label: `counts` are uint32, a row per client from `first` on."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="client_splits", db_index=False)
    first = models.PositiveIntegerField()
    clients = models.PositiveIntegerField()
    labels = models.JSONField()
    counts = models.BinaryField()

    class Meta:
        constraints = (models.UniqueConstraint(fields=["job", "first"], name="one_row_a_part_of_a_split"),)

    def __str__(self) -> str:
        return f"clients {self.first} to {self.first + self.clients - 1}"


class PendingRoundEvent(models.Model):
    """A stored event of a federation's server whose rounds and clients have no rows yet.

    One event may bring 400 rounds, or the names of 6,000 clients: each gets a transaction of its own.
    """

    attempt = models.ForeignKey(Attempt, models.CASCADE, related_name="+")
    event = models.OneToOneField(Event, models.CASCADE, related_name="+")

    def __str__(self) -> str:
        return f"event {self.event_id}"

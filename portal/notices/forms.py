"""Validate the form of a channel: its address, what it receives, and when."""

from __future__ import annotations

from typing import Any, cast

from django import forms
from django.core.exceptions import ValidationError
from django.core.validators import validate_email

from portal.models import Channel
from portal.outbox import kinds
from portal.outbox.hours import zones
from portal.sending import outside


class ChannelForm(forms.Form):
    """Edit a channel. With a `stored_address` the field may stay empty: an address with a secret is not shown."""

    address = forms.CharField(max_length=500, error_messages={"max_length": "The address is too long."})
    kinds = forms.MultipleChoiceField(
        required=False, error_messages={"invalid_choice": "This kind of notification is not available to you."}
    )
    digest = forms.ChoiceField(choices=Channel.Digest.choices, required=False)
    quiet_from = forms.TimeField(required=False, error_messages={"invalid": "Enter a time such as 22:00."})
    quiet_until = forms.TimeField(required=False, error_messages={"invalid": "Enter a time such as 07:00."})
    time_zone = forms.ChoiceField(
        choices=[], error_messages={"invalid_choice": "Unknown time zone. Choose one from the list."}
    )
    is_paused = forms.BooleanField(required=False)

    def __init__(
        self, kind: str, *args: Any, is_sysadmin: bool, of_project: bool, stored_address: str = "", **named: Any
    ) -> None:
        super().__init__(*args, **named)
        self.kind, self.stored_address = kind, stored_address
        self.is_email = kind == Channel.Kind.EMAIL
        self.offered = kinds.choices(is_sysadmin=is_sysadmin, of_project=of_project)
        self.fields["address"].required = not stored_address
        self.fields["address"].error_messages["required"] = "The address is missing."
        cast(forms.MultipleChoiceField, self.fields["kinds"]).choices = self.offered
        cast(forms.ChoiceField, self.fields["time_zone"]).choices = [(name, name) for name in zones()]

    def clean_address(self) -> str:
        address: str = self.cleaned_data["address"].strip() or self.stored_address
        if self.is_email:
            try:
                validate_email(address)
            except ValidationError:
                raise ValidationError("This is not an e-mail address such as mira@lab.example.") from None
            return address
        try:
            outside.checked(address)
        except outside.AddressRefused as error:
            raise ValidationError(str(error)) from None
        return address

    def clean(self) -> dict[str, Any]:
        given = super().clean() or self.cleaned_data
        start, end = given.get("quiet_from"), given.get("quiet_until")
        if (start is None) != (end is None) and not {"quiet_from", "quiet_until"} & set(self.errors):
            self.add_error("quiet_until", "Quiet hours need both a start and an end, or neither.")
        if start is not None and start == end:
            self.add_error(
                "quiet_until", "Quiet hours must not start and end at the same time. Leave both empty for none."
            )
        return given

    def fields_of(self) -> dict[str, Any]:
        """Return the channel's fields. Excluded kinds are stored, so that kinds added in the future are sent."""
        given = dict(self.cleaned_data)
        wanted = set(given.pop("kinds"))
        return {**given, "left_out": [code for code, _ in self.offered if code not in wanted]}

    @staticmethod
    def initial_of(channel: Channel) -> dict[str, Any]:
        fields = {"digest", "time_zone", "is_paused"}
        clocks = {
            name: value.strftime("%H:%M") if (value := getattr(channel, name)) else ""
            for name in ("quiet_from", "quiet_until")
        }
        return {
            **{name: getattr(channel, name) for name in fields},
            **clocks,
            "address": channel.address if channel.kind == Channel.Kind.EMAIL else "",
            "kinds": [kind.code for kind in kinds.KINDS if kind.code not in channel.left_out],
        }

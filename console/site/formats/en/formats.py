"""Define date and time formats of the admin: Django's own are American and omit the seconds."""

DATETIME_FORMAT = "Y-m-d H:i:s"
DATE_FORMAT = "Y-m-d"

"""Write dates and times of the records: Django's own are American, and leave the seconds out."""

DATETIME_FORMAT = "Y-m-d H:i:s"
DATE_FORMAT = "Y-m-d"

"""The errors of the doctor, whose texts the command prints."""


class DoctorError(Exception):
    """Nothing could be examined or written; the text is one sentence with the reason."""

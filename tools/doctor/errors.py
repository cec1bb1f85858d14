"""The errors of the doctor; their texts are printed on the command line."""


class DoctorError(Exception):
    """Nothing could be examined, or written; one sentence that says why."""

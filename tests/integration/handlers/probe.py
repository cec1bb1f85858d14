"""Answers with what it was given."""


def handle(data, context):
    if data is None:
        return None
    return [
        {
            "data": {
                name: [type(value).__name__, _represent(value)] for name, value in row.items()
            },
            "headers": context.get_all_request_header(index),
            "id": context.get_request_id(index),
            "batch": len(data),
        }
        for index, row in enumerate(data)
    ]


def _represent(value):
    return value.decode("latin-1") if isinstance(value, bytes | bytearray) else value

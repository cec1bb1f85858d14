"""For the request envelopes: adds one to every number it is given.

Of an input of KServe's second protocol, which is an object, it takes the data.
"""


def handle(data, context):
    if data is None:
        return None
    return [_increased(item) for item in data]


def _increased(value):
    if isinstance(value, dict) and "data" in value:
        return _increased(value["data"])
    if isinstance(value, list):
        return [_increased(item) for item in value]
    return value + 1 if isinstance(value, int | float) else value

"""The functions of the workflow: two nodes side by side, one of which is the model."""


def start(data, context):
    return data and [row["body"] for row in data]


side = start


def end(data, context):
    return data and [row["echo"] for row in data]
